"""Chooses the tokens of highest entropy in each mini-batch, over all workers (arXiv:2506.01939)."""

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
    scatter_valid,
    valid_rows,
    values,
)
from siirl_dask.nodes.token_masks.thresholds import largest_float32
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    ENTROPIES,
    HIGH_ENTROPY,
    MINIBATCH,
    RESPONSE_IDS,
    RESPONSE_MASK,
    TYPES,
    fields,
)


def _check_fraction(*, fraction: float = 0.2, **others: object) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fraction={fraction}: expected more than 0 and at most 1, as a share of the tokens"
        )


@columns(
    reads=[RESPONSE_IDS, ENTROPIES, MINIBATCH],
    one_of=[ADVANTAGE, ADVANTAGES],
    optional=[RESPONSE_MASK],
    writes=fields(HIGH_ENTROPY),
    trial=_check_fraction,
)
def choose_high_entropy(
    ctx: Context,
    table: pa.Table,
    *,
    minibatches: int,
    fraction: float = 0.2,
) -> pa.Table:
    """Mark the ``fraction`` of each mini-batch's tokens at which the policy was least certain: those
    whose entropy is at least the quantile ``1 - fraction``, which TRL takes too.

    A fifth of the tokens, where reasoning forks, is worth as much as all of them or more
    (arXiv:2506.01939). Entropies are those before the update, so the choice is made once a step;
    tokens as uncertain as the last one chosen are chosen with it. At least one is. Any number of
    workers marks the same tokens. ValueError for a fraction outside (0, 1].
    """
    comparable = valid_rows(table, [advantages_of(table)])
    rows = table.filter(comparable)
    mask, offsets = response_mask(rows)
    entropies, _ = packed(rows[ENTROPIES])
    entropies = entropies.float().clamp(min=0)  # rounding may take those of certain tokens below 0
    minibatch_of = values(rows[MINIBATCH]).repeat_interleave(offsets.diff())
    high = torch.zeros(len(mask), dtype=torch.bool)
    for minibatch in range(minibatches):
        in_minibatch = mask & (minibatch_of == minibatch)
        threshold = _threshold(ctx, entropies[in_minibatch], fraction)
        high |= in_minibatch & (entropies >= threshold)
    ctx.log("policy/high_entropy_tokens", high[mask].float().tolist())
    return table.append_column(
        HIGH_ENTROPY, scatter_valid(comparable, ragged(high, offsets, TYPES[HIGH_ENTROPY]))
    )


def _threshold(ctx: Context, entropies: Tensor, fraction: float) -> float:
    """Return the least entropy of all workers' tokens that is no less than the quantile
    ``1 - fraction`` of them; 0 where there are no tokens.
    """
    (total,) = ctx.all_sum([float(len(entropies))])
    # the quantile lies between tokens, fraction * (total - 1) of them below the highest
    wanted = int(fraction * max(0.0, total - 1)) + 1

    def enough(threshold: float) -> bool:
        (count,) = ctx.all_sum([float((entropies >= threshold).sum())])
        return count >= wanted

    threshold = largest_float32(enough)
    return 0.0 if threshold is None else threshold
