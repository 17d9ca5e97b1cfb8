"""Nodes that add penalties to rewards: for leaving the reference policy, and for responses near
the length limit.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import KLController, k1, overlong_penalty
from siirl_dask.context import Context
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, count_first_rows, row_positions
from siirl_dask.nodes.packed_table import packed, ragged, response_mask, values
from siirl_dask.planner import columns
from siirl_dask.schema import (
    EPISODE_ID,
    KL_PENALTY,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    REWARD,
    TYPES,
    fields,
)


@columns(
    reads=[RESPONSE_IDS, OLD_LOGPROBS, REFERENCE_LOGPROBS],
    optional=[RESPONSE_MASK, *EPISODE_COLUMNS],
    writes=fields(KL_PENALTY),
    stateful=True,
)
def penalise_kl(
    ctx: Context, table: pa.Table, *, kl: Callable[[Tensor, Tensor], Tensor] = k1
) -> pa.Table:
    """Add each token's penalty ``-coefficient * kl(old, reference)``.

    The role's KLController holds the coefficient, and adapts it after each step to the mean
    divergence of the response tokens on all its workers, faster the more samples there are: an
    episode of several rows is one.
    """
    controller: KLController = ctx.resource
    mask, offsets = response_mask(table)
    old_logprobs, _ = packed(table[OLD_LOGPROBS])
    reference_logprobs, _ = packed(table[REFERENCE_LOGPROBS])
    divergence = kl(old_logprobs, reference_logprobs) * mask
    coefficient = controller.coefficient
    own_sums = [float(divergence.double().sum()), float(mask.sum()), float(count_first_rows(table))]
    total, tokens, samples = ctx.all_sum(own_sums)
    if tokens:
        mean = total / tokens
        controller.update(mean, int(samples))
        if ctx.rank.rank == 0:
            ctx.log("kl/mean", mean)
    if ctx.rank.rank == 0:
        ctx.log("kl/coefficient", coefficient)
    return table.append_column(
        KL_PENALTY, ragged(-coefficient * divergence, offsets, TYPES[KL_PENALTY])
    )


@columns(
    reads=[REWARD, RESPONSE_IDS],
    optional=[RESPONSE_MASK, *EPISODE_COLUMNS],
    writes=fields(REWARD),
)
def penalise_overlong(
    ctx: Context,
    table: pa.Table,
    *,
    max_length: int,
    buffer: int | None = None,
    factor: float = 1.0,
) -> pa.Table:
    """Subtract DAPO's soft penalty for long responses (arXiv:2503.14476).

    It is 0 up to ``max_length - buffer`` tokens of the response and rises linearly to ``factor`` at
    ``max_length``. ``buffer`` defaults to a fifth of ``max_length``, as in the paper. An episode of
    several rows has the length of all of them, and its penalty is in the reward of its last one.
    """
    if buffer is None:
        buffer = max(1, max_length // 5)
    lengths = values(pc.list_value_length(table[RESPONSE_IDS]))
    is_last = torch.ones(table.num_rows, dtype=torch.bool)
    if EPISODE_ID in table.column_names:
        positions = row_positions(ctx, table, lengths)
        lengths = positions.spans.lengths
        is_last = positions.is_last
    penalty = overlong_penalty(lengths, max_length=max_length, buffer=buffer, factor=factor)
    ctx.log("reward/overlong_penalty", penalty[is_last].tolist())
    penalty = torch.where(is_last, penalty, torch.zeros_like(penalty))
    rewards = pc.add(table[REWARD], pa.array(penalty.numpy(), TYPES[REWARD]))
    return table.set_column(table.column_names.index(REWARD), REWARD, rewards)
