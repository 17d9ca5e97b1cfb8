"""Masks the tokens that the policy has moved furthest from, over all workers (M2PO,
arXiv:2510.01161).
"""

from __future__ import annotations

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.context import Context
from siirl_dask.nodes.packed_table import (
    advantages_of,
    packed,
    ragged,
    response_mask,
    valid_rows,
    values,
)
from siirl_dask.nodes.token_masks.thresholds import largest_float32
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    MINIBATCH,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    TYPES,
    fields,
)


def _check_limit(*, limit: float = 0.04, **others: object) -> None:
    if not limit > 0:
        raise ValueError(f"limit={limit}: expected more than 0, the mean of squared log-ratios")


@columns(
    reads=[RESPONSE_IDS, OLD_LOGPROBS, ROLLOUT_LOGPROBS, MINIBATCH],
    one_of=[ADVANTAGE, ADVANTAGES],
    optional=[RESPONSE_MASK],
    writes=fields(RESPONSE_MASK),
    trial=_check_limit,
)
def mask_second_moment(
    ctx: Context,
    table: pa.Table,
    *,
    minibatches: int,
    limit: float = 0.04,
) -> pa.Table:
    """Mask, in each mini-batch, the tokens of largest ``(old - rollout)^2`` until the mean of the
    others is below ``limit`` (M2PO, arXiv:2510.01161, as AReaL has it).

    The second moment of log-ratios does not cancel as their mean does, and a few tokens make most
    of it: with rows of old weights it masks these and leaves the rest to a loss without a clip,
    such as ``ppo_clip`` with ``clip_low: 1.0`` and ``clip_high: .inf``. Masked tokens do not count
    in the loss's denominators. Tokens that are equally far go together, and where even the nearest
    are too far, all do. Any number of workers masks the same tokens. ValueError for a limit that is
    not above 0.
    """
    comparable = valid_rows(table, [advantages_of(table)])
    mask, offsets = response_mask(table)
    usable = mask & torch.from_numpy(comparable).repeat_interleave(offsets.diff())
    old_logprobs, _ = packed(table[OLD_LOGPROBS])
    rollout_logprobs, _ = packed(table[ROLLOUT_LOGPROBS])
    squares = (old_logprobs.float() - rollout_logprobs.float()).square()
    minibatch_of = values(table[MINIBATCH]).repeat_interleave(offsets.diff())
    too_far = torch.zeros(len(mask), dtype=torch.bool)
    for minibatch in range(minibatches):
        in_minibatch = usable & (minibatch_of == minibatch)
        threshold = _threshold(ctx, squares[in_minibatch], limit)
        too_far |= in_minibatch & (squares > threshold)
    ctx.log("policy/second_moment_masked", too_far[usable].float().tolist())
    column = ragged(mask & ~too_far, offsets, TYPES[RESPONSE_MASK])
    if RESPONSE_MASK in table.column_names:
        return table.set_column(table.column_names.index(RESPONSE_MASK), RESPONSE_MASK, column)
    return table.append_column(RESPONSE_MASK, column)


def _threshold(ctx: Context, squares: Tensor, limit: float) -> float:
    """Return the largest number up to which all workers' squares have a mean below ``limit``."""

    def mean_is_below(threshold: float) -> bool:
        near = squares[squares <= threshold].double()
        count, total = ctx.all_sum([float(len(near)), float(near.sum())])
        if not count:
            return True
        return total < limit * count

    threshold = largest_float32(mean_is_below)
    assert threshold is not None, "the mean of no squares, or of zeros, is below a limit above 0"
    return threshold
