"""The rows of episodes as a table, and what is logged of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.coordinator.blobs import rows_at
from siirl_dask.nodes.episode import Rules
from siirl_dask.nodes.episode_rows import NOT_SAMPLED, Played, PlayedRow
from siirl_dask.nodes.sampling import SAMPLED
from siirl_dask.rollout import FinishReason, RolloutEngine
from siirl_dask.schema import (
    AGENT,
    EPISODE_ID,
    FINISH_REASON,
    OBSERVED_IMAGES,
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

EPISODE_ROWS = SAMPLED | fields(
    PROMPT_IDS, PROMPT_TEXT, RESPONSE_MASK, TOKEN_VERSIONS, TURNS, EPISODE_ID, SEGMENT, REWARD, REWARD_PARTS
)
"""The columns that a node adds whose rows are those of episodes, besides ``agent`` where there are several."""


class RowOfTokens(Protocol):
    """A row of an episode: a prompt, and what the policy and others wrote after it."""

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
    """Return the rows of each of the ``episodes``, whose row ids are their numbers, with ``others`` as columns.

    Row k of episode e is row ``e * most_rows + k``.
    """
    counts = [len(own) for own in rows]
    table = rows_at(episodes, np.repeat(np.arange(len(rows)), counts))
    numbers = table[ROW_ID].to_numpy()
    flat, decode = [row for own in rows for row in own], engine.tokenizer.decode
    processor = getattr(engine, "processor", None)
    shown = [row.prompt if processor is None else processor.shortened(row.prompt) for row in flat]
    columns: dict[str, Sequence[object]] = {
        ROW_ID: numbers * most_rows + np.array([k for count in counts for k in range(count)], dtype=np.int64),
        TOKENS: [len(row.prompt) + len(row.response) for row in flat],
        EPISODE_ID: numbers,
        PROMPT_IDS: [row.prompt for row in flat],
        PROMPT_TEXT: [decode(ids, skip_special=False) for ids in shown],
        RESPONSE_IDS: [row.response for row in flat],
        RESPONSE: [decode(row.response, skip_special=True) for row in flat],
        RESPONSE_MASK: [row.mask for row in flat],
        ROLLOUT_LOGPROBS: [row.logprobs for row in flat],
        **others,
    }
    for name, values in columns.items():
        column = pa.array(values, TYPES[name])
        at = table.column_names.index(name) if name in table.column_names else None
        table = table.append_column(name, column) if at is None else table.set_column(at, name, column)
    return table


def episode_table(
    ctx: Context,
    engine: RolloutEngine,
    episodes: pa.Table,
    played: Sequence[Played],
    *,
    rules: Rules,
    n: int,
    agents: bool,
    images: bool,
) -> pa.Table:
    """Return the rows of each episode that was played, in the order of ``episodes``, whose ids are their numbers.

    ``n`` is the number of episodes of a prompt. ``agents`` says whether there are several, ``images`` whether
    environments show any.
    """
    numbers = [number for number, one in zip(episodes[ROW_ID].to_pylist(), played, strict=True) for _ in one.rows]
    within = [k for one in played for k in range(len(one.rows))]
    rows = [row for one in played for row in one.rows]
    others: dict[str, Sequence[object]] = {
        SEGMENT: [row.segment for row in rows],
        TOKEN_VERSIONS: [row.versions for row in rows],
        WEIGHTS_VERSION: [min((v for v in row.versions if v != NOT_SAMPLED), default=engine.version) for row in rows],
        TURNS: [_turns(row) for row in rows],
        FINISH_REASON: [str(row.reason) for row in rows],
        REWARD: [row.reward for row in rows],
        REWARD_PARTS: [[*row.parts.items()] for row in rows],
        WORKER: [one.worker for one in played for _ in one.rows],
    }
    if SAMPLING_SEED not in episodes.column_names:  # those of earlier steps have theirs
        others[SAMPLE_NUMBER] = [number % n for number in numbers]
        others[SAMPLING_SEED] = [ctx.seed(at * rules.rows + k) for at, k in zip(numbers, within, strict=True)]
    if agents:
        others[AGENT] = [row.agent for row in rows]
    if images:
        others[OBSERVED_IMAGES] = [[{"start": at, "bytes": data} for at, data in row.observed] for row in rows]
    return rows_of_episodes(engine, episodes, [one.rows for one in played], rules.rows, others)


def _turns(row: PlayedRow) -> list[dict[str, float]]:
    return [{"start": t.start, "stop": t.stop, "reward": t.reward, "state": t.state} for t in row.turns]


def log_episodes(ctx: Context, table: pa.Table, played: Sequence[Played]) -> None:
    """Log the rows' lengths, and the episodes' turns and rewards, which are sums over an agent's rows."""
    log_rows(
        ctx,
        table,
        failed=sum(one.failure is not None for one in played),
        turns=[sum(len(row.turns) for row in one.rows) for one in played],
    )
    rewards = [total for one in played if one.failure is None for total in _totals(one.rows)]
    parts = [part for one in played if one.failure is None for row in one.rows for part in row.parts.items()]
    log_rewards(ctx, rewards, parts)


def log_rows(ctx: Context, table: pa.Table, *, failed: int, turns: Sequence[int]) -> None:
    """Log the rows' lengths, and of each episode its ``turns``; ``failed`` of the episodes failed."""
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
    """Log rewards, and numbers that were given beside them, by name."""
    ctx.log("reward/mean", rewards)
    ctx.log("reward/std", rewards, Reduce.STD)
    for name in sorted({name for name, _ in parts} - {REWARD}):
        ctx.log(f"reward/{name}", [value for own, value in parts if own == name])


def _totals(rows: Sequence[PlayedRow]) -> list[float]:
    """Return the sum of the rewards of each agent's rows."""
    totals: dict[str | None, float] = {}
    for row in rows:
        totals[row.agent] = totals.get(row.agent, 0.0) + (row.reward or 0.0)
    return [*totals.values()]
