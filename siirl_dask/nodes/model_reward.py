"""Scores of a reward model."""

from __future__ import annotations

import pyarrow as pa

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import RewardError
from siirl_dask.nodes.packing import pack_rows
from siirl_dask.planner import columns
from siirl_dask.schema import PROMPT_IDS, RESPONSE_IDS, REWARD, ROW_ID, TYPES, fields
from siirl_dask.training import RewardModel


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], writes=fields(REWARD))
def score_with_model(ctx: Context, table: pa.Table) -> pa.Table:
    """The reward model's score of each row, prompt and response. RewardError with the row that got no finite one."""
    model: RewardModel = ctx.resource
    scores = model.scores(pack_rows(table).rows)
    if not scores.isfinite().all():
        at = int((~scores.isfinite()).nonzero()[0])
        raise RewardError(
            f"the reward model gave {scores[at].item()}: expected a finite number (row {table[ROW_ID][at].as_py()} "
            f"of step {ctx.step}); with model.dtype=bfloat16, try float32"
        )
    ctx.log("reward/mean", scores.tolist())
    ctx.log("reward/std", scores.tolist(), Reduce.STD)
    return table.append_column(REWARD, pa.array(scores.numpy(), TYPES[REWARD]))
