"""Scores the turns of episodes one by one with a reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.nodes.early_scores import argument_names
from siirl_dask.nodes.packed_table import one_chunk
from siirl_dask.nodes.reward import score
from siirl_dask.planner import Changes
from siirl_dask.planner import columns as declares
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import ANSWER, PROMPT, RESPONSE, RESPONSE_IDS, REWARD, ROW_ID, TURNS, TYPES, fields

TURN, TURN_REWARD = "turn", "turn_reward"
_OF_TURNS = {TURN: pa.int32(), TURN_REWARD: pa.float32()}
_RENAMED = {"reward/mean": "turn_reward/mean", "reward/std": "turn_reward/std"}


def _changes(*, columns: Sequence[str], engine: str, **options: object) -> Changes:
    return Changes(reads=[name for name in columns if name not in _OF_TURNS], neighbour=engine)


@declares(
    reads=[PROMPT, ANSWER, RESPONSE_IDS, TURNS],
    optional=[REWARD],
    writes=fields(TURNS, REWARD),
    depends_on_options=_changes,
)
def score_turns(
    ctx: Context, table: pa.Table, *, engine: str = "rollout", columns: tuple[str, ...] = (), add: bool = False
) -> pa.Table:
    """Fill the rewards of turns: the scorer's function gets each turn's text as its ``response``.

    Among ``columns``, which the function gets by name, ``turn`` is the turn's number in its row, from 0, and
    ``turn_reward`` the reward that the environment gave it. The result replaces that reward, or with ``add`` is added
    to it. The row's reward becomes the sum of its turns', 0 without any. A row that has no reward, because its episode
    failed, is not scored and keeps none. ``engine`` is the role whose tokenizer decodes the turns: it must be on each
    of the node's workers.

    Where the function fails on a turn, the turn and its row get null rewards, as with ``score``, and
    ``rewards.max_failures`` counts turns.
    """
    lost = one_chunk(table[REWARD]).is_null().to_pylist() if REWARD in table.column_names else [False] * table.num_rows
    spans = one_chunk(table[TURNS]).to_pylist()
    row_of = [row for row, turns in enumerate(spans) if not lost[row] for _ in turns]
    turns = [turn for row, turns in enumerate(spans) if not lost[row] for turn in turns]
    decoder: RolloutEngine = ctx.resources[engine]
    scored = score(
        inner := replace(ctx, metrics={}, begun=None),
        _turn_table(table, row_of, turns, decoder, columns),
        columns=columns,
    )
    for name, metric in inner.metrics.items():
        ctx.metrics[_RENAMED.get(name, name)] = metric
    rewards: list[float | None] = [None if gone else 0.0 for gone in lost]
    for row, turn, reward in zip(row_of, turns, scored[REWARD].to_pylist(), strict=True):
        turn["reward"] = reward + turn["reward"] * add if reward is not None else None
        so_far = rewards[row]
        rewards[row] = None if so_far is None or turn["reward"] is None else so_far + turn["reward"]
    valid = [reward for reward in rewards if reward is not None]
    ctx.log("reward/mean", valid)
    ctx.log("reward/std", valid, Reduce.STD)
    table = table.drop_columns([name for name in (TURNS, REWARD) if name in table.column_names])
    table = table.append_column(TURNS, pa.array(spans, TYPES[TURNS]))
    return table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))


def _turn_table(
    table: pa.Table,
    row_of: Sequence[int],
    turns: Sequence[Mapping[str, Any]],
    engine: RolloutEngine,
    columns: Sequence[str],
) -> pa.Table:
    """Return a row for each turn, as ``score`` reads them: the turn's text is the response."""
    names = [name for name in [ROW_ID, *argument_names(columns)] if name != RESPONSE and name not in _OF_TURNS]
    ids = one_chunk(table[RESPONSE_IDS])
    texts = [
        engine.tokenizer.decode(ids[row].values[turn["start"] : turn["stop"]].to_pylist(), skip_special=True)
        for row, turn in zip(row_of, turns, strict=True)
    ]
    first: dict[int, int] = {}
    numbers = [at - first.setdefault(row, at) for at, row in enumerate(row_of)]
    rows = table.select(names).take(pa.array(row_of, pa.int64()))
    given = {RESPONSE: texts, TURN: numbers, TURN_REWARD: [turn["reward"] for turn in turns]}
    for name, numbers_or_texts in given.items():
        rows = rows.append_column(name, pa.array(numbers_or_texts, {**TYPES, **_OF_TURNS}[name]))
    return rows
