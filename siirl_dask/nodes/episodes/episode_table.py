"""The rows of episodes as a table, and what is logged of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.nodes.continued.row_progress import NOT_SAMPLED
from siirl_dask.nodes.episodes.episode import EpisodeRules
from siirl_dask.nodes.episodes.episode_rows import PlayedEpisode, PlayedRow
from siirl_dask.nodes.sampling import SAMPLED
from siirl_dask.rollout import FinishReason, RolloutEngine, processor_of
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    FINISH_REASON,
    OBSERVED_IMAGES,
    PLAIN_RESPONSE,
    PROMPT_IDS,
    PROMPT_TEXT,
    RESPONSE,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    REWARD_PARTS,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    SAMPLE_NUMBER,
    SAMPLING_SEED,
    SEGMENT,
    TOKEN_VERSIONS,
    TOKENS,
    TURNS,
    TYPES,
    WEIGHTS_VERSION,
    WORKER,
    fields,
)
from siirl_dask.tables import rows_at

EPISODE_ROWS = (
    SAMPLED
    | fields(PROMPT_IDS, PROMPT_TEXT, RESPONSE_MASK, TOKEN_VERSIONS, TURNS)
    | fields(EPISODE_ID, SEGMENT, REWARD, REWARD_PARTS)
)
"""The columns of a node whose rows are those of episodes, besides ``agent`` where there are
several."""


class RowOfTokens(Protocol):
    """A row of an episode: a prompt, and a response with tokens of the policy and of others."""

    prompt: list[int]
    response: list[int]
    mask: list[bool]
    logprobs: list[float]


def rows_of_episodes(
    engine: RolloutEngine,
    episodes: pa.Table,
    rows: Sequence[Sequence[RowOfTokens]],
    most_rows: int,
    others: Mapping[str, Sequence[object]],
) -> pa.Table:
    """Return the rows of each of the ``episodes``, whose row ids are their numbers, with ``others``
    as columns.

    Row k of episode e is row ``e * most_rows + k``.
    """
    counts = np.array([len(episode) for episode in rows], dtype=np.int64)
    table = rows_at(episodes, np.repeat(np.arange(len(rows)), counts))
    episode_ids = table[ROW_ID].to_numpy()
    flat = [row for episode in rows for row in episode]
    first_of_episode = np.cumsum(counts) - counts
    index_in_episode = np.arange(len(flat)) - np.repeat(first_of_episode, counts)
    decode = engine.tokenizer.decode
    processor = processor_of(engine)
    shown_prompts = [row.prompt for row in flat]
    if processor is not None:
        shown_prompts = [processor.shortened(prompt) for prompt in shown_prompts]
    columns: dict[str, Sequence[object]] = {
        ROW_ID: episode_ids * most_rows + index_in_episode,
        TOKENS: [len(row.prompt) + len(row.response) for row in flat],
        EPISODE_ID: episode_ids,
        PROMPT_IDS: [row.prompt for row in flat],
        PROMPT_TEXT: [decode(ids, skip_special=False) for ids in shown_prompts],
        RESPONSE_IDS: [row.response for row in flat],
        RESPONSE: [decode(row.response, skip_special=True) for row in flat],
        PLAIN_RESPONSE: [engine.tokenizer.plain_text(row.response) for row in flat],
        RESPONSE_MASK: [row.mask for row in flat],
        ROLLOUT_LOGPROBS: [row.logprobs for row in flat],
        **others,
    }
    for name, values in columns.items():
        column = pa.array(values, TYPES[name])
        if name in table.column_names:
            table = table.set_column(table.column_names.index(name), name, column)
        else:
            table = table.append_column(name, column)
    return table


def oldest_version(versions: Sequence[int], engine: RolloutEngine) -> int:
    """Return the oldest version of the weights that sampled a token of a row; the engine's where
    none did.
    """
    return min((version for version in versions if version != NOT_SAMPLED), default=engine.version)


def episode_table(
    ctx: Context,
    engine: RolloutEngine,
    episodes: pa.Table,
    played: Sequence[PlayedEpisode],
    *,
    rules: EpisodeRules,
    n: int,
    agents: bool,
    images: bool,
) -> pa.Table:
    """Return the rows of each episode that was played, in the order of ``episodes``, whose ids are
    their numbers.

    ``n`` is the number of episodes of a prompt. ``agents`` says whether there are several,
    ``images`` whether environments show any.
    """
    rows: list[PlayedRow] = []
    workers: list[str] = []
    sample_numbers: list[int] = []
    seeds: list[int] = []
    for number, episode in zip(episodes[ROW_ID].to_pylist(), played, strict=True):
        for index, row in enumerate(episode.rows):
            rows.append(row)
            workers.append(episode.worker)
            sample_numbers.append(number % n)
            seeds.append(ctx.seed(number * rules.rows + index))
    others: dict[str, Sequence[object]] = {
        SEGMENT: [row.segment for row in rows],
        TOKEN_VERSIONS: [row.versions for row in rows],
        WEIGHTS_VERSION: [oldest_version(row.versions, engine) for row in rows],
        TURNS: [_turns(row) for row in rows],
        FINISH_REASON: [str(row.reason) for row in rows],
        REWARD: [row.reward for row in rows],
        REWARD_PARTS: [[*row.parts.items()] for row in rows],
        WORKER: workers,
    }
    # episodes of a partial rollout have those of their first step
    if SAMPLING_SEED not in episodes.column_names:
        others[SAMPLE_NUMBER] = sample_numbers
        others[SAMPLING_SEED] = seeds
    if agents:
        others[AGENT] = [row.agent for row in rows]
    if images:
        observed = []
        for row in rows:
            observed.append([{"start": start, "bytes": data} for start, data in row.observed])
        others[OBSERVED_IMAGES] = observed
    return rows_of_episodes(
        engine, episodes, [episode.rows for episode in played], rules.rows, others
    )


def _turns(row: PlayedRow) -> list[dict[str, float]]:
    return [
        {"start": turn.start, "stop": turn.stop, "reward": turn.reward, "state": turn.state}
        for turn in row.turns
    ]


def log_episodes(ctx: Context, table: pa.Table, played: Sequence[PlayedEpisode]) -> None:
    """Log the rows' lengths, and the episodes' turns and rewards, which are sums over an agent's
    rows.
    """
    succeeded = [episode for episode in played if episode.failure is None]
    turn_counts = [sum(len(row.turns) for row in episode.rows) for episode in played]
    log_rows(ctx, table, failed=len(played) - len(succeeded), turns=turn_counts)
    rewards: list[float] = []
    parts: list[tuple[str, float]] = []
    for episode in succeeded:
        rewards += _agent_rewards(episode.rows)
        for row in episode.rows:
            parts += row.parts.items()
    log_rewards(ctx, rewards, parts)


def log_rows(ctx: Context, table: pa.Table, *, failed: int, turns: Sequence[int]) -> None:
    """Log the rows' lengths, the number of turns of each episode, and how many episodes failed."""
    lengths = table[RESPONSE_IDS].combine_chunks().value_lengths().to_pylist()
    ctx.log("samples", table.num_rows, Reduce.SUM)
    ctx.log("tokens", sum(table[TOKENS].to_pylist()), Reduce.SUM)
    ctx.log("response/length", lengths)
    ctx.log("response/length_std", lengths, Reduce.STD)
    reasons = table[FINISH_REASON].to_pylist()
    ctx.log("response/truncated", [float(reason == FinishReason.LENGTH) for reason in reasons])
    ctx.log("episodes", len(turns), Reduce.SUM)
    ctx.log("episodes/failed", failed, Reduce.SUM)
    ctx.log("episodes/turns", turns)


def log_rewards(ctx: Context, rewards: Sequence[float], parts: Sequence[tuple[str, float]]) -> None:
    """Log rewards, and the numbers that environments or agents gave in addition, by name."""
    ctx.log("reward/mean", rewards)
    ctx.log("reward/std", rewards, Reduce.STD)
    values_of: dict[str, list[float]] = {}
    for name, value in parts:
        values_of.setdefault(name, []).append(value)
    for name in sorted(values_of.keys() - {REWARD}):
        ctx.log(f"reward/{name}", values_of[name])


def _agent_rewards(rows: Sequence[PlayedRow]) -> list[float]:
    """Return the sum of the rewards of each agent's rows."""
    totals: dict[str | None, float] = {}
    for row in rows:
        reward = 0.0 if row.reward is None else row.reward
        totals[row.agent] = totals.get(row.agent, 0.0) + reward
    return [*totals.values()]
