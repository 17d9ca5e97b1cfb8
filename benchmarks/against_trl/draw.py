"""Mini-batches drawn as TRL draws them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.planner import columns
from siirl_dask.schema import MINIBATCH, ROW_ID, TYPES, fields

_DRAW = -1  # no row's id: a seed of its own


@columns(reads=[ROW_ID], writes=fields(MINIBATCH))
def draw_rows(ctx: Context, table: pa.Table, *, minibatches: int, batch_size: int) -> pa.Table:
    """Which mini-batch each row is in: the step's rows are shuffled, whatever their prompts, and cut into equal runs.

    One worker has all rows; ``batch_size``, prompts, is what ``draw_minibatches`` takes in its place.
    """
    order = np.random.default_rng(ctx.seed(_DRAW)).permutation(table.num_rows)
    drawn = order[table[ROW_ID].to_numpy()] * minibatches // table.num_rows
    return table.append_column(MINIBATCH, pa.array(drawn, TYPES[MINIBATCH]))
