"""Scoring responses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import RewardError
from siirl_dask.planner import columns
from siirl_dask.schema import ANSWER, PROMPT, RESPONSE, REWARD, ROW_ID, TYPES, fields

_SHOWN = 200  # characters of a prompt or a response in an error


@columns(reads=[PROMPT, RESPONSE, ANSWER], writes=fields(REWARD))
def score(ctx: Context, table: pa.Table, *, reward: Callable[..., float]) -> pa.Table:
    """``reward(prompt, response, answer)`` of each row. RewardError with the row when it raises or gives no finite
    number: a made-up score never trains.
    """
    rows = table.select([ROW_ID, PROMPT, RESPONSE, ANSWER]).to_pylist()
    rewards = [_score_row(ctx, row, reward) for row in rows]
    ctx.log("reward/mean", rewards)
    ctx.log("reward/std", rewards, Reduce.STD)
    return table.append_column(REWARD, pa.array(rewards, TYPES[REWARD]))


def _score_row(ctx: Context, row: dict[str, object], reward: Callable[..., float]) -> float:
    prompt, response, answer = row[PROMPT], row[RESPONSE], row[ANSWER]
    where = f"row {row[ROW_ID]} of step {ctx.step}, prompt {prompt!r:.{_SHOWN}}, response {response!r:.{_SHOWN}}"
    try:
        value = reward(prompt, response, answer)
    except Exception as error:
        name = getattr(reward, "__qualname__", repr(reward))
        raise RewardError(
            f"reward {name} raised {type(error).__name__}: {error} ({where}, answer {answer!r})"
        ) from error
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RewardError(f"the reward gave {value!r}: expected a finite number ({where}, answer {answer!r})")
    return float(value)
