"""Advantages, and the draw of mini-batches."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from torch import Tensor

from siirl_dask.context import Context
from siirl_dask.coordinator.tensors import values
from siirl_dask.planner import columns
from siirl_dask.schema import ADVANTAGE, GROUP_ID, MINIBATCH, REWARD, TYPES, fields

_DRAW = -1  # in place of a row id, for the seed of a draw that belongs to the step as a whole


@columns(reads=[REWARD, GROUP_ID], writes=fields(ADVANTAGE))
def estimate_advantage(ctx: Context, table: pa.Table, *, advantage: Callable[[Tensor, Tensor], Tensor]) -> pa.Table:
    """``advantage(rewards [R], group_ids [R]) -> [R]``; the node asks for rows=GROUPED so that groups are whole."""
    estimated = advantage(values(table[REWARD]), values(table[GROUP_ID]))
    return table.append_column(ADVANTAGE, pa.array(estimated.numpy(), TYPES[ADVANTAGE]))


@columns(reads=[GROUP_ID], writes=fields(MINIBATCH))
def draw_minibatches(ctx: Context, table: pa.Table, *, minibatches: int, batch_size: int) -> pa.Table:
    """Which mini-batch each row is in: the step's prompts are shuffled and cut into equal runs, samples go with their
    prompt. A function of the step's seed alone, so every worker draws the same without asking.
    """
    order = np.random.default_rng(ctx.seed(_DRAW)).permutation(batch_size)
    drawn = order[table[GROUP_ID].to_numpy()] * minibatches // batch_size
    return table.append_column(MINIBATCH, pa.array(drawn, TYPES[MINIBATCH]))
