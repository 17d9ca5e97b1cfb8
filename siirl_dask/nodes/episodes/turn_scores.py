"""Scores the turns of episodes one by one with a reward function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.nodes.packed_table import one_chunk
from siirl_dask.nodes.reward import argument_names, score
from siirl_dask.planner import ContractChanges, columns
from siirl_dask.rollout import RolloutEngine
from siirl_dask.schema import (
    ANSWER,
    PLAIN_RESPONSE,
    PROMPT,
    RESPONSE,
    RESPONSE_IDS,
    REWARD,
    ROW_ID,
    TURNS,
    TYPES,
    fields,
)

TURN = "turn"
TURN_REWARD = "turn_reward"
_TURN_TYPES = {TURN: pa.int32(), TURN_REWARD: pa.float32()}
_METRIC_NAMES = {"reward/mean": "turn_reward/mean", "reward/std": "turn_reward/std"}


def _changes(*, columns: Sequence[str], engine: str, **options: object) -> ContractChanges:
    return ContractChanges(
        reads=[name for name in columns if name not in _TURN_TYPES], neighbour=engine
    )


@columns(
    reads=[PROMPT, ANSWER, RESPONSE_IDS, TURNS],
    optional=[REWARD],
    writes=fields(TURNS, REWARD),
    depends_on_options=_changes,
)
def score_turns(
    ctx: Context,
    table: pa.Table,
    *,
    engine: str = "rollout",
    columns: tuple[str, ...] = (),
    add: bool = False,
) -> pa.Table:
    """Fill the rewards of turns: the scorer's function gets each turn's text as its ``response``.

    Among ``columns``, which the function gets by name, ``turn`` is the turn's number in its row,
    from 0, and ``turn_reward`` the reward that the environment gave it. The result replaces that
    reward, or with ``add`` is added to it. The row's reward becomes the sum of its turns', 0
    without any. A row that has no reward, because its episode failed, is not scored and keeps none.
    ``engine`` is the role whose tokenizer decodes the turns: it must be on each of the node's
    workers.

    Where the function fails on a turn, the turn and its row get null rewards, as with ``score``,
    and ``rewards.max_failures`` counts turns.
    """
    if REWARD in table.column_names:
        failed = one_chunk(table[REWARD]).is_null().to_pylist()
    else:
        failed = [False] * table.num_rows
    turns_of_rows: list[list[dict[str, Any]]] = one_chunk(table[TURNS]).to_pylist()
    row_of_turn: list[int] = []
    turns: list[dict[str, Any]] = []
    for row, row_turns in enumerate(turns_of_rows):
        if not failed[row]:
            row_of_turn += [row] * len(row_turns)
            turns += row_turns
    decoder: RolloutEngine = ctx.resources[engine]
    turn_table = _turn_table(table, row_of_turn, turns, decoder, columns)
    turn_context = replace(ctx, metrics={}, begun=None)
    scored = score(turn_context, turn_table, columns=columns)
    for name, metric in turn_context.metrics.items():
        ctx.metrics[_METRIC_NAMES.get(name, name)] = metric
    for turn, reward in zip(turns, scored[REWARD].to_pylist(), strict=True):
        if reward is not None and add:
            reward += turn["reward"]
        turn["reward"] = reward
    rewards: list[float | None] = []
    for row_turns, row_failed in zip(turns_of_rows, failed, strict=True):
        if row_failed or any(turn["reward"] is None for turn in row_turns):
            rewards.append(None)
            continue
        total = 0.0
        for turn in row_turns:  # sum() rounds differently from Python 3.12 on
            total += turn["reward"]
        rewards.append(total)
    valid = [reward for reward in rewards if reward is not None]
    ctx.log("reward/mean", valid)
    ctx.log("reward/std", valid, Reduce.STD)
    table = table.drop_columns([name for name in (TURNS, REWARD) if name in table.column_names])
    table = table.append_column(TURNS, pa.array(turns_of_rows, TYPES[TURNS]))
    return table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))


def _turn_table(
    table: pa.Table,
    row_of_turn: Sequence[int],
    turns: Sequence[Mapping[str, Any]],
    engine: RolloutEngine,
    columns: Sequence[str],
) -> pa.Table:
    """Return a row for each turn, as ``score`` reads them: the turn's text is the response."""
    names = [
        name
        for name in [ROW_ID, *argument_names(columns)]
        if name not in (RESPONSE, PLAIN_RESPONSE) and name not in _TURN_TYPES
    ]
    rows = table.select(names).take(pa.array(row_of_turn, pa.int64()))
    response_ids = one_chunk(table[RESPONSE_IDS])
    texts: list[str] = []
    plain_texts: list[str | None] = []
    numbers: list[int] = []
    first_turn: dict[int, int] = {}
    for index, (row, turn) in enumerate(zip(row_of_turn, turns, strict=True)):
        ids = response_ids[row].values[turn["start"] : turn["stop"]].to_pylist()
        texts.append(engine.tokenizer.decode(ids, skip_special=True))
        plain_texts.append(engine.tokenizer.plain_text(ids))
        numbers.append(index - first_turn.setdefault(row, index))
    rewards = [turn["reward"] for turn in turns]
    rows = rows.append_column(RESPONSE, pa.array(texts, TYPES[RESPONSE]))
    rows = rows.append_column(PLAIN_RESPONSE, pa.array(plain_texts, TYPES[PLAIN_RESPONSE]))
    rows = rows.append_column(TURN, pa.array(numbers, _TURN_TYPES[TURN]))
    return rows.append_column(TURN_REWARD, pa.array(rewards, _TURN_TYPES[TURN_REWARD]))
