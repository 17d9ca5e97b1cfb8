"""Updates the critic from a step's rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import torch
from torch import Tensor

from siirl_dask.algorithms import TokenLoss, Totals, ValueInputs, token_mean, value_clip
from siirl_dask.context import Context
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS
from siirl_dask.nodes.nonfinite import nonfinite_handler
from siirl_dask.nodes.packed_table import pack_rows
from siirl_dask.nodes.update import check_loss, log_metrics, split_minibatches
from siirl_dask.planner import columns
from siirl_dask.schema import (
    IMAGES,
    MINIBATCH,
    OBSERVED_IMAGES,
    PROMPT_IDS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    VALUES,
)
from siirl_dask.training import Critic, EpisodeSpans, ValueBatch


def _check_critic_loss(
    *,
    loss: Callable[[ValueInputs], TokenLoss] = value_clip,
    aggregate: Callable[[Tensor, Totals], Tensor] = token_mean,
    **others: object,
) -> None:
    """Call the loss and the aggregation with no tokens, as ``_check_policy_loss`` does."""
    empty = torch.zeros(0)
    inputs = ValueInputs(
        values=empty.clone().requires_grad_(),
        old_values=empty,
        returns=empty,
        offsets=torch.zeros(1, dtype=torch.int64),
    )
    check_loss(loss(inputs), aggregate)


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS, VALUES, RETURNS, MINIBATCH],
    optional=[RESPONSE_MASK, *EPISODE_COLUMNS],
    if_written=[IMAGES, OBSERVED_IMAGES],
    trial=_check_critic_loss,
)
def update_critic(
    ctx: Context,
    table: pa.Table,
    *,
    minibatches: int,
    loss: Callable[[ValueInputs], TokenLoss] = value_clip,
    aggregate: Callable[[Tensor, Totals], Tensor] = token_mean,
    epochs: int = 1,
) -> pa.Table:
    """Take one optimizer step per mini-batch towards the returns, in order, ``epochs`` times over.

    Rows without returns are left out. Episodes of several rows, and a mini-batch that is not
    finite, are handled as by ``update_policy``.
    """
    ctx.free_device()
    critic: Critic = ctx.resource
    tables, spans = split_minibatches(ctx, table, RETURNS, minibatches)
    batches = []
    for rows, own_spans in zip(tables, spans, strict=True):
        batches.append(_value_batch(rows, own_spans))
    on_nonfinite = nonfinite_handler(ctx, tables)
    metrics = critic.update(batches * epochs, loss, aggregate, on_nonfinite)
    log_metrics(ctx, "critic", metrics)
    return table


def _value_batch(table: pa.Table, episodes: EpisodeSpans | None) -> ValueBatch:
    packed = pack_rows(table)
    return ValueBatch(
        rows=packed.rows,
        episodes=episodes,
        mask=packed.optional(table, RESPONSE_MASK),
        old_values=packed.column(table, VALUES),
        returns=packed.column(table, RETURNS),
    )
