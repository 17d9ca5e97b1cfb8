"""Runs agents, which talk to the engine through an OpenAI-compatible endpoint, and makes rows of
what they sampled.

An agent is a function ``async def agent(client, row)``, or a command, that runs one episode with
any client or harness and returns its reward. See ``siirl_dask/rollout/endpoint``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from siirl_dask.config import EndpointConfig, RolloutConfig, ValidationConfig
from siirl_dask.context import Codec, Context, Reduce
from siirl_dask.errors import ConfigError, EpisodeError
from siirl_dask.nodes.episodes.agent_rows import (
    AgentCodec,
    AgentEpisode,
    agent_rows,
    log_agent_episodes,
)
from siirl_dask.nodes.episodes.episode_rows import EpisodeCodec, Item
from siirl_dask.nodes.episodes.episode_table import EPISODE_ROWS
from siirl_dask.nodes.evaluate import validation_sampling
from siirl_dask.nodes.failures import GIVEN_UP, check_failures, failed_episodes
from siirl_dask.nodes.prompts import MAX_TOKENS, token_limits
from siirl_dask.nodes.sampling import log_passes, rollout_sampling
from siirl_dask.planner import columns, reads_option
from siirl_dask.rewards import Score, score_of
from siirl_dask.rollout import LocalQueue, RolloutEngine, Sampling
from siirl_dask.rollout.endpoint import (
    Agent,
    AgentQueue,
    AgentRuns,
    Bounds,
    Conversation,
    Endpoint,
    Outcome,
    Program,
    ProgramEpisode,
)
from siirl_dask.schema import ANSWER, PROMPT, PROMPT_IDS, ROW_ID, SAMPLE_NUMBER, TYPES
from siirl_dask.tables import rows_at

# that run at once for each row of the engine: most of them wait for something else
_AGENTS_PER_ROW = 4
_MAX_PROGRAMS = 32  # that run at once on a worker


def _check_options(
    *,
    rollout: RolloutConfig,
    agent: Agent | None = None,
    command: Sequence[str] = (),
    **options: object,
) -> None:
    if (agent is None) == (not command):
        raise ConfigError(
            f"agent={agent!r} and command={list(command)}: expected one of them, a function or a "
            "command"
        )
    if rollout.router_replay:
        raise ConfigError(
            "rollout.router_replay=true: the rows of an agent's episode have no routes; leave it "
            "out"
        )
    if rollout.in_flight:
        raise ConfigError(
            "rollout.in_flight=true: the rows of an agent's episode have no version of each of "
            "their tokens; leave it out"
        )
    if rollout.continues_rows:
        key = f"rollout.window={rollout.window}" if rollout.window else "rollout.partial=true"
        raise ConfigError(f"{key}: an episode ends in the step in which it began; leave it out")


@columns(
    reads=[PROMPT, ANSWER, PROMPT_IDS],
    optional=[MAX_TOKENS],
    writes=EPISODE_ROWS,
    depends_on_options=reads_option("columns"),
    expand=("rollout.n", "endpoint.max_segments"),
    groups="kept",
    trial=_check_options,
)
def run_agents(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    endpoint: EndpointConfig,
    max_prompt_length: int,
    agent: Agent | None = None,
    command: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
) -> pa.Table:
    """Run ``rollout.n`` episodes of each prompt with ``agent``, or with a program that ``command``
    starts.

    The agent gets the row's prompt, answer and ``columns``. Sample k of the prompt at position p is
    episode ``e = p * n + k``, and row j of the episode is row ``e * endpoint.max_segments + j``.
    The tokens before a row's first answer are at most ``max_prompt_length``, the others
    ``rollout.max_response_length``. An episode fails when its agent raises, takes too long, asks
    the model nothing, or returns neither a reward nor None: its rows have no reward, and
    EpisodeError ends the run when more fail than ``endpoint.max_failures``.
    """
    return _run(
        ctx,
        table,
        sampling=rollout_sampling(rollout),
        n=rollout.n,
        agent=Program(command) if agent is None else agent,
        rollout=rollout,
        config=endpoint,
        max_prompt_length=max_prompt_length,
        columns=columns,
    )


@columns(
    reads=[PROMPT, ANSWER, PROMPT_IDS],
    optional=[MAX_TOKENS],
    writes=EPISODE_ROWS,
    depends_on_options=reads_option("columns"),
    expand=("validation.n", "endpoint.max_segments"),
    groups="kept",
    trial=_check_options,
)
def run_agents_to_validate(
    ctx: Context,
    table: pa.Table,
    *,
    rollout: RolloutConfig,
    endpoint: EndpointConfig,
    validation: ValidationConfig,
    max_prompt_length: int,
    agent: Agent | None = None,
    command: tuple[str, ...] = (),
    columns: tuple[str, ...] = (),
) -> pa.Table:
    """Run ``validation.n`` episodes of each prompt with agents, sampled as ``validation`` says."""
    return _run(
        ctx,
        table,
        sampling=validation_sampling(rollout, validation),
        n=validation.n,
        agent=Program(command) if agent is None else agent,
        rollout=rollout,
        config=endpoint,
        max_prompt_length=max_prompt_length,
        columns=columns,
    )


def _run(
    ctx: Context,
    table: pa.Table,
    *,
    sampling: Sampling,
    n: int,
    agent: Agent,
    rollout: RolloutConfig,
    config: EndpointConfig,
    max_prompt_length: int,
    columns: tuple[str, ...],
) -> pa.Table:
    bounds = Bounds(
        prompt=max_prompt_length,
        response=rollout.max_response_length,
        context=ctx.resource.context_length,
        requests=config.max_requests,
        segments=config.max_segments,
    )
    rows = _episode_rows(table, n)
    names = dict.fromkeys([ROW_ID, PROMPT, ANSWER, *columns, PROMPT_IDS, MAX_TOKENS])
    items = rows.select([name for name in names if name in rows.column_names])
    episodes = _run_episodes(
        ctx,
        items,
        make_episode=partial(_make_episode, ctx, sampling, bounds, columns),
        agent=agent,
        config=config,
        max_rows=rollout.max_rows,
    )
    _check_failures(ctx, rows, episodes, config)
    made = agent_rows(ctx, rows, episodes, config.max_segments)
    log_agent_episodes(ctx, made, episodes)
    return made


def _episode_rows(table: pa.Table, n: int) -> pa.Table:
    """Return a row for each episode, ``n`` for each prompt, with the episode's number as its id.

    DataError for a row's own limit of tokens that is not a number of at least 1.
    """
    rows = rows_at(table, np.repeat(np.arange(table.num_rows), n))
    samples = np.tile(np.arange(n), table.num_rows)
    numbers = table[ROW_ID].to_numpy().repeat(n) * n + samples
    token_limits(rows)
    rows = rows.set_column(
        rows.column_names.index(ROW_ID), ROW_ID, pa.array(numbers, TYPES[ROW_ID])
    )
    return rows.append_column(SAMPLE_NUMBER, pa.array(samples, TYPES[SAMPLE_NUMBER]))


def _make_episode(
    ctx: Context,
    sampling: Sampling,
    bounds: Bounds,
    columns: Sequence[str],
    item: Item,
) -> ProgramEpisode:
    """Return the episode that an agent runs. The row's own limit of tokens bounds the tokens
    that may be sampled.
    """
    engine: RolloutEngine = ctx.resource
    seed = ctx.seed(item[ROW_ID] * bounds.segments)
    limit = item.get(MAX_TOKENS)
    if limit is not None:
        bounds = bounds.with_response(limit)
    row = {name: item[name] for name in (PROMPT, ANSWER, *columns)}
    conversation = Conversation(engine.tokenizer, item[PROMPT_IDS], seed, sampling, bounds)
    return ProgramEpisode(row, seed, conversation)


def _max_open(agent: Agent, config: EndpointConfig, max_rows: int) -> int:
    """Return the most agents that run at once on a worker."""
    if config.max_open is not None:
        return config.max_open
    if isinstance(agent, Program):
        return _MAX_PROGRAMS
    return _AGENTS_PER_ROW * max_rows


def _run_episodes(
    ctx: Context,
    items: pa.Table,
    *,
    make_episode: Callable[[Item], ProgramEpisode],
    agent: Agent,
    config: EndpointConfig,
    max_rows: int,
) -> list[AgentEpisode]:
    """Run the agents while the engine serves them, here or on a peer that ran idle; return each
    episode.
    """
    engine: RolloutEngine = ctx.resource
    own_items: list[Item] = items.to_pylist()
    item_codec = EpisodeCodec(items.schema, engine.version, config.max_segments)
    result_codec = AgentCodec(item_codec)
    codec = Codec(
        item_codec.pack_item,
        item_codec.read_item,
        result_codec.pack_result,
        result_codec.read_result,
    )
    source: Any = LocalQueue(own_items)
    if ctx.steal_from_peers is not None:
        source = ctx.steal_from_peers(own_items, codec)
    ctx.free_device()
    runs: AgentRuns | None = None

    def check_stop() -> None:
        ctx.check_stop()
        if runs is not None:
            runs.check()

    queue = AgentQueue(ctx.device, check_stop)
    with Endpoint(engine, queue, config, ctx.rank) as endpoint:
        runs = AgentRuns(
            agent=agent,
            source=source,
            own=len(own_items),
            make=make_episode,
            result=partial(_agent_episode, worker=ctx.device.worker),
            endpoint=endpoint,
            model=config.model,
            max_open=_max_open(agent, config, max_rows),
            rows=max_rows,
            timeout=config.timeout,
            max_failures=config.max_failures,
            count=queue.count_agents,
            done=queue.end,
        )
        start = time.perf_counter()
        with runs:
            engine.serve(queue)
        runs.finish()
    busy_seconds = time.perf_counter() - start
    with ctx.device.waiting():
        episodes: list[AgentEpisode] = source.results()
    ctx.log("rollout/busy_seconds", busy_seconds)
    ctx.log("rollout/longest_busy_seconds", busy_seconds, Reduce.MAX)
    ctx.log("rollout/taken_over", source.taken_over, Reduce.SUM)
    log_passes(ctx)
    ctx.log("endpoint/refused", endpoint.serving.refused, Reduce.SUM)
    ctx.log("endpoint/overridden", endpoint.serving.overridden, Reduce.SUM)
    return episodes


def _agent_episode(
    episode: ProgramEpisode, outcome: Outcome | None, *, worker: str
) -> AgentEpisode:
    """Return an episode with its score; ``outcome`` is None for one that was given up.

    An episode without a request has one row, of its prompt alone.
    """
    if outcome is None:
        outcome = Outcome(failure=GIVEN_UP)
    if outcome.failure is not None:
        score = Score(failure=outcome.failure)
    elif outcome.result is None:
        score = Score()
    else:
        score = score_of((outcome.result, None))
    segments = outcome.segments
    if not segments:
        segments = [episode.conversation.unasked()]
    return AgentEpisode(segments, score, outcome.requests, outcome.seconds, worker)


def _check_failures(
    ctx: Context,
    rows: pa.Table,
    episodes: Sequence[AgentEpisode],
    config: EndpointConfig,
) -> None:
    """Raise EpisodeError on all workers when over all of them more episodes failed than
    ``endpoint.max_failures``.
    """

    def describe(index: int) -> tuple[str, int]:
        row: dict[str, Any] = rows.select([ROW_ID, PROMPT]).slice(index, 1).to_pylist()[0]
        message = (
            f"the agent {episodes[index].score.failure}: episode {row[ROW_ID]} of step {ctx.step}, "
            f"after {episodes[index].requests} requests, prompt {row[PROMPT]!r:.200}"
        )
        return message, row[ROW_ID]

    check_failures(
        ctx,
        failed_episodes([episode.score.failure for episode in episodes], describe),
        most=config.max_failures,
        key="endpoint.max_failures",
        whose="the agent",
        kind="episodes",
        error=EpisodeError,
    )
