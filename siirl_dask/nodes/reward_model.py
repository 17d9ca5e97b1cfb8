"""Scores responses by a reward model."""

from __future__ import annotations

import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.errors import Origin, RewardError
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.nodes.reward import log_rewards
from siirl_dask.planner import columns
from siirl_dask.schema import PROMPT_IDS, RESPONSE_IDS, REWARD, ROW_ID, TYPES, fields
from siirl_dask.training import RewardModel


@columns(reads=[PROMPT_IDS, RESPONSE_IDS], optional=EPISODE_COLUMNS, writes=fields(REWARD))
def score_with_model(ctx: Context, table: pa.Table) -> pa.Table:
    """Add the reward model's score of each row, prompt and response. RewardError names a row
    with no finite score.
    """
    model: RewardModel = ctx.resource
    scores = model.scores(pack_rows(table).rows)
    finite = scores.isfinite()
    if not finite.all():
        index = int((~finite).nonzero()[0])
        row_id = table[ROW_ID][index].as_py()
        error = RewardError(
            f"the reward model gave {scores[index].item()}: expected a finite number "
            f"(row {row_id} of step {ctx.step}); with model.dtype=bfloat16, try float32"
        )
        error.origin = Origin(rows=(row_id,))
        raise error
    log_rewards(ctx, table, scores.tolist())
    return table.append_column(REWARD, pa.array(scores.numpy(), TYPES[REWARD]))
