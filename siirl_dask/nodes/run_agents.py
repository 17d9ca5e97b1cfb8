"""Runs agents, which talk to the engine through an OpenAI-compatible endpoint, and makes rows of what they sampled.

An agent is a function ``async def agent(client, row)``, or a command, that lives one episode with any client or harness
and returns its reward. See ``siirl_dask/rollout/endpoint``.
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
from siirl_dask.coordinator.blobs import rows_at
from siirl_dask.errors import ConfigError, EpisodeError
from siirl_dask.nodes.agent_rows import AgentCodec, Lived, lived_rows, log_lived
from siirl_dask.nodes.episode_rows import EpisodeCodec, Item
from siirl_dask.nodes.episode_table import EPISODE_ROWS
from siirl_dask.nodes.failures import GIVEN_UP, check_failures, failed_episodes
from siirl_dask.nodes.generate import rollout_sampling, validation_sampling
from siirl_dask.nodes.prompts import MAX_TOKENS, token_limits
from siirl_dask.planner import columns as declares
from siirl_dask.planner import reads_option
from siirl_dask.rewards import Score
from siirl_dask.rewards.scorer import score_of
from siirl_dask.rollout import LocalQueue, RolloutEngine, Sampling
from siirl_dask.rollout.endpoint import (
    Agent,
    AgentQueue,
    AgentRuns,
    Bounds,
    Conversation,
    Endpoint,
    Episode,
    Outcome,
    Program,
)
from siirl_dask.schema import ANSWER, PROMPT, PROMPT_IDS, ROW_ID, SAMPLE_NUMBER, TYPES

_PER_ROW = 4  # agents that run at once for each row of the engine: most of them wait for something else
_PROGRAMS = 32  # programs that run at once on a worker


def _try(
    *,
    rollout: RolloutConfig,
    agent: Agent | None = None,
    command: Sequence[str] = (),
    **options: object,
) -> None:
    if (agent is None) == (not command):
        raise ConfigError(f"agent={agent!r} and command={list(command)}: expected one of them, a function or a command")
    if rollout.tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.tensor_parallel_size={rollout.tensor_parallel_size}: the ranks of such an engine begin all rows "
            "together, and an agent's next request is not known before it has an answer; leave it at 1"
        )
    if rollout.router_replay:
        raise ConfigError("rollout.router_replay=true: the rows of an agent's episode have no routes; leave it out")
    if rollout.partial:
        raise ConfigError("rollout.partial=true: an episode ends in the step in which it began; leave it out")


@declares(
    reads=[PROMPT, ANSWER, PROMPT_IDS],
    optional=[MAX_TOKENS],
    writes=EPISODE_ROWS,
    depends_on_options=reads_option("columns"),
    expand=("rollout.n", "endpoint.max_segments"),
    groups="kept",
    trial=_try,
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
    """Let ``agent``, or a program that ``command`` starts, live ``rollout.n`` episodes of each prompt.

    It gets the row's prompt, answer and ``columns``. Sample k of the prompt at position p is episode ``e = p * n + k``,
    and row j of the episode is row ``e * endpoint.max_segments + j``. What comes before a row's first answer has at
    most ``max_prompt_length`` tokens, what follows ``rollout.max_response_length``. An episode fails when its agent
    raises, takes too long, asks the model nothing, or returns neither a reward nor None: its rows have no reward, and
    EpisodeError ends the run when more fail than ``endpoint.max_failures``.
    """
    live = Program(command) if agent is None else agent
    return _run(
        ctx, table, [rollout_sampling(rollout)] * rollout.n, live, rollout, endpoint, max_prompt_length, columns
    )


@declares(
    reads=[PROMPT, ANSWER, PROMPT_IDS],
    optional=[MAX_TOKENS],
    writes=EPISODE_ROWS,
    depends_on_options=reads_option("columns"),
    expand=("validation.n", "endpoint.max_segments"),
    groups="kept",
    trial=_try,
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
    """Let agents live ``validation.n`` episodes of each prompt, sampled as ``validation`` says."""
    live, samplings = (
        Program(command) if agent is None else agent,
        [validation_sampling(rollout, validation)] * validation.n,
    )
    return _run(ctx, table, samplings, live, rollout, endpoint, max_prompt_length, columns)


def _run(
    ctx: Context,
    table: pa.Table,
    samplings: Sequence[Sampling],
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
    rows = _episodes(table, len(samplings))
    most = config.max_open or (_PROGRAMS if isinstance(agent, Program) else _PER_ROW * rollout.max_rows)
    given = (ROW_ID, PROMPT, ANSWER, *columns, PROMPT_IDS, MAX_TOKENS)
    items = rows.select([name for name in dict.fromkeys(given) if name in rows.column_names])
    make = partial(_episode, ctx, samplings[0], bounds, columns)
    lived = _live(ctx, items, make, agent, config, most, rollout.max_rows)
    _check_failures(ctx, rows, lived, config)
    made = lived_rows(ctx, rows, lived, config.max_segments)
    log_lived(ctx, made, lived)
    return made


def _episodes(table: pa.Table, n: int) -> pa.Table:
    """Return a row for each episode, ``n`` for each prompt, with the episode's number as its id."""
    rows, samples = rows_at(table, np.repeat(np.arange(table.num_rows), n)), np.tile(np.arange(n), table.num_rows)
    numbers = table[ROW_ID].to_numpy().repeat(n) * n + samples
    token_limits(rows)  # refuses what is no limit
    rows = rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(numbers, TYPES[ROW_ID]))
    return rows.append_column(SAMPLE_NUMBER, pa.array(samples, TYPES[SAMPLE_NUMBER]))


def _episode(ctx: Context, sampling: Sampling, bounds: Bounds, columns: Sequence[str], item: Item) -> Episode:
    """Return what is to be lived; the row's own limit of tokens bounds what its agent can have sampled."""
    engine: RolloutEngine = ctx.resource
    seed, limit = ctx.seed(item[ROW_ID] * bounds.segments), item.get(MAX_TOKENS)
    own = bounds if limit is None else bounds.with_response(limit)
    row = {name: item[name] for name in (PROMPT, ANSWER, *columns)}
    return Episode(row, seed, Conversation(engine.tokenizer, item[PROMPT_IDS], seed, sampling, own))


def _live(
    ctx: Context,
    items: pa.Table,
    make: Callable[[Item], Episode],
    agent: Agent,
    config: EndpointConfig,
    most: int,
    max_rows: int,
) -> list[Lived]:
    """Run the agents beside the engine, here or on a peer that ran idle; return each episode."""
    engine: RolloutEngine = ctx.resource
    waiting: list[Item] = items.to_pylist()
    episodes = EpisodeCodec(items.schema, engine.version, config.max_segments)
    lives = AgentCodec(episodes)
    codec = Codec(episodes.pack_item, episodes.read_item, lives.pack_result, lives.read_result)
    source = LocalQueue(waiting) if ctx.steal_from_peers is None else ctx.steal_from_peers(waiting, codec)
    ctx.free_device()
    runs: AgentRuns | None = None

    def check() -> None:
        ctx.check_stop()
        if runs is not None:
            runs.check()

    queue = AgentQueue(ctx.device, check)
    with Endpoint(engine, queue, config, ctx.rank) as endpoint:
        runs = AgentRuns(
            agent=agent,
            source=source,
            own=len(waiting),
            make=make,
            result=partial(_lived, worker=ctx.device.worker),
            endpoint=endpoint,
            model=config.model,
            max_open=most,
            rows=max_rows,
            timeout=config.timeout,
            max_failures=config.max_failures,
            count=queue.count_agents,
            done=queue.end,
        )
        began = time.perf_counter()
        with runs:
            engine.serve(queue)
        runs.finish()
    busy = time.perf_counter() - began
    with ctx.device.waiting():
        lived: list[Lived] = source.results()
    ctx.log("rollout/busy_seconds", busy)
    ctx.log("rollout/longest_busy_seconds", busy, Reduce.MAX)
    ctx.log("rollout/taken_over", source.taken_over, Reduce.SUM)
    ctx.log("endpoint/refused", endpoint.serving.refused, Reduce.SUM)
    ctx.log("endpoint/overridden", endpoint.serving.overridden, Reduce.SUM)
    return lived


def _lived(episode: Episode, outcome: Outcome | None, *, worker: str) -> Lived:
    """Return an episode with its score. One without a request has a row of its prompt alone."""
    if outcome is None:
        outcome = Outcome(failure=GIVEN_UP)
    score = Score(failure=outcome.failure)
    if outcome.failure is None and outcome.result is not None:
        score = score_of((outcome.result, None))
    segments = outcome.segments or [episode.conversation.unasked()]
    return Lived(segments, score, outcome.requests, outcome.seconds, worker)


def _check_failures(ctx: Context, rows: pa.Table, lived: Sequence[Lived], config: EndpointConfig) -> None:
    """Raise EpisodeError on all workers when more episodes failed on all of them together than may."""

    def describe(at: int) -> tuple[str, int]:
        row: dict[str, Any] = rows.select([ROW_ID, PROMPT]).slice(at, 1).to_pylist()[0]
        told = (
            f"the agent {lived[at].score.failure}: episode {row[ROW_ID]} of step {ctx.step}, after "
            f"{lived[at].requests} requests, prompt {row[PROMPT]!r:.200}"
        )
        return told, row[ROW_ID]

    check_failures(
        ctx,
        failed_episodes([one.score.failure for one in lived], describe),
        most=config.max_failures,
        key="endpoint.max_failures",
        whose="the agent",
        kind="episodes",
        error=EpisodeError,
    )
