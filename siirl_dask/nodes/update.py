"""Updates the policy from a step's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from siirl_dask.algorithms import LossInputs, TokenLoss, Totals, k3, row_sums, token_mean
from siirl_dask.config import ENGINES_LOGPROBS
from siirl_dask.context import Context, Reduce
from siirl_dask.errors import TrainingError, counted
from siirl_dask.nodes.episodes.sequences import EPISODE_COLUMNS, row_positions
from siirl_dask.nodes.nonfinite import nonfinite_handler
from siirl_dask.nodes.packed_table import (
    advantages_of,
    pack_rows,
    response_mask,
    valid_rows,
    values,
)
from siirl_dask.nodes.routes import packed_routes
from siirl_dask.planner import columns, reads_option
from siirl_dask.schema import (
    ADVANTAGE,
    ADVANTAGES,
    EPISODE_ID,
    IMAGES,
    MINIBATCH,
    OBSERVED_IMAGES,
    OLD_LOGPROBS,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    ROUTED_EXPERTS,
    ROW_ID,
    WEIGHTS_VERSION,
)
from siirl_dask.tables import rows_where
from siirl_dask.training import EpisodeSpans, TrainBatch, Trainer

_MAX_LOG_RATIO = 20.0  # keeps the logged mismatch of a broken sampler finite


def _check_policy_loss(
    *,
    loss: Callable[[LossInputs], TokenLoss],
    aggregate: Callable[[Tensor, Totals], Tensor] = token_mean,
    columns: Sequence[str] = (),
    **others: object,
) -> None:
    """Call the loss and the aggregation with no tokens, before the run begins. TypeError or
    ValueError for results of the wrong type or shape.
    """
    empty = torch.zeros(0)
    inputs = LossInputs(
        logprobs=empty.clone().requires_grad_(),
        old_logprobs=empty,
        advantages=empty,
        rollout_logprobs=empty,
        entropy=empty.clone().requires_grad_(),
        reference_logprobs=empty,
        offsets=torch.zeros(1, dtype=torch.int64),
        columns=dict.fromkeys(columns, empty),
    )
    check_loss(loss(inputs), aggregate)


def check_loss(result: object, aggregate: Callable[[Tensor, Totals], Tensor]) -> None:
    """Raise TypeError or ValueError for a loss or an aggregation of no tokens that is not a number
    a token.
    """
    if not isinstance(result, TokenLoss):
        raise TypeError(f"the loss gave a {type(result).__name__}: expected a TokenLoss")
    weights = aggregate(torch.zeros(1, dtype=torch.int64), Totals(tokens=1, rows=1))
    for name, tensor in {"loss": result.loss, "aggregation": weights, **result.metrics}.items():
        if tensor.shape != (0,):
            raise ValueError(
                f"{name} of no tokens has shape {list(tensor.shape)}: expected [0], a number a "
                "token"
            )


@columns(
    reads=[PROMPT_IDS, RESPONSE_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS, MINIBATCH],
    one_of=[ADVANTAGE, ADVANTAGES],
    optional=[REFERENCE_LOGPROBS, RESPONSE_MASK, WEIGHTS_VERSION, *EPISODE_COLUMNS],
    if_written=[IMAGES, OBSERVED_IMAGES, ROUTED_EXPERTS],
    depends_on_options=reads_option("columns"),
    trial=_check_policy_loss,
)
def update_policy(
    ctx: Context,
    table: pa.Table,
    *,
    loss: Callable[[LossInputs], TokenLoss],
    minibatches: int,
    aggregate: Callable[[Tensor, Totals], Tensor] = token_mean,
    columns: tuple[str, ...] = (),
    max_staleness: int = 0,
    epochs: int = 1,
    critic_warmup_steps: int = 0,
    old_logprobs: str = "",
) -> pa.Table:
    """Take one optimizer step per mini-batch, in order, ``epochs`` times over; none in the run's
    first ``critic_warmup_steps`` steps.

    Every worker of the role takes part in each, with rows or without; a mini-batch without rows
    anywhere takes no step. Rows without an advantage are left out. An aggregation counts episodes
    where these have several rows. ``columns``, with a number per row or per response token, reach
    the loss as ``LossInputs.columns``.

    The difference between sampler and policy is logged as ``mismatch/...``, unless the function
    that ``old_logprobs`` names, as in ``algorithm.old_logprobs``, took the log-probs of the
    sampler.

    TrainingError for rows sampled by weights that are more than ``max_staleness`` steps old, and
    for a mini-batch whose loss or gradient is not finite; with ``run.on_nan=skip`` its step is left
    out instead.
    """
    ctx.free_device()
    _check_staleness(ctx, table, max_staleness)
    trainer: Trainer = ctx.resource
    tables, spans = split_minibatches(ctx, table, advantages_of(table), minibatches)
    batches = []
    for rows, own_spans in zip(tables, spans, strict=True):
        batches.append(_train_batch(rows, own_spans, columns))
    if old_logprobs != ENGINES_LOGPROBS:  # else only the engine has computed log-probs
        for batch in batches:
            _log_mismatch(ctx, batch)
    if ctx.step > critic_warmup_steps:
        on_nonfinite = nonfinite_handler(ctx, tables)
        metrics = trainer.update(batches * epochs, loss, aggregate, on_nonfinite)
        log_metrics(ctx, "policy", metrics)
    return table


def split_minibatches(
    ctx: Context,
    table: pa.Table,
    needed: str,
    minibatches: int,
) -> tuple[Sequence[pa.Table], Sequence[EpisodeSpans | None]]:
    """Return the rows of each mini-batch and their spans in episodes, without rows whose column
    ``needed`` is null.
    """
    table = rows_where(table, valid_rows(table, [needed]))
    tables = []
    for minibatch in range(minibatches):
        tables.append(rows_where(table, pc.equal(table[MINIBATCH], minibatch)))
    if EPISODE_ID not in table.column_names:
        return tables, [None] * minibatches
    mask, offsets = response_mask(table)
    spans = row_positions(ctx, table, row_sums(mask.long(), offsets)).spans
    minibatch_of_row = values(table[MINIBATCH])
    return tables, [spans.select(minibatch_of_row == minibatch) for minibatch in range(minibatches)]


def log_metrics(ctx: Context, name: str, metrics: Mapping[str, float]) -> None:
    """Log a trainer's numbers as ``name/...``, once for all its workers, which they cover."""
    if ctx.rank.rank == 0:
        for metric, value in metrics.items():
            ctx.log(f"{name}/{metric}", value)


def _log_mismatch(ctx: Context, batch: TrainBatch) -> None:
    """Log the k3 estimate of KL(sampler, policy) before the update, and the largest ratio of
    probabilities.
    """
    difference = batch.old_logprobs - batch.rollout_logprobs
    difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    if batch.mask is not None:
        difference = difference[batch.mask]
    count = len(difference)
    if count:
        kl = k3(-difference, difference.new_zeros(count)).mean()
        ctx.log("mismatch/kl", float(kl), weight=count)
        ctx.log("mismatch/max_ratio", float(difference.abs().max().exp()), Reduce.MAX)


def _check_staleness(ctx: Context, table: pa.Table, max_staleness: int) -> None:
    """Log the age of the weights that sampled the rows. TrainingError for rows older than
    ``max_staleness`` steps.
    """
    if WEIGHTS_VERSION not in table.column_names or not table.num_rows:
        return
    staleness = ctx.step - 1 - table[WEIGHTS_VERSION].to_numpy()
    highest = int(staleness.max())
    if highest > max_staleness:
        row_id = table[ROW_ID][int(staleness.argmax())].as_py()
        raise TrainingError(
            f"row {row_id} was sampled by weights {counted(highest, 'step')} behind: expected at "
            f"most {max_staleness} (rollout.max_staleness); does a node load the weights of each "
            "step?"
        )
    ctx.log("staleness/mean", staleness.tolist())
    ctx.log("staleness/max", float(highest), Reduce.MAX)


def _train_batch(
    table: pa.Table, episodes: EpisodeSpans | None, columns: tuple[str, ...]
) -> TrainBatch:
    packed = pack_rows(table, packed_routes(table))
    return TrainBatch(
        rows=packed.rows,
        episodes=episodes,
        mask=packed.optional(table, RESPONSE_MASK),
        old_logprobs=packed.column(table, OLD_LOGPROBS),
        advantages=packed.column(table, advantages_of(table)),
        rollout_logprobs=packed.column(table, ROLLOUT_LOGPROBS),
        reference_logprobs=packed.optional(table, REFERENCE_LOGPROBS),
        columns={name: packed.column(table, name) for name in columns},
    )
