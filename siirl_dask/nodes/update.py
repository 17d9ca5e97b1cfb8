"""Learning from a step's rows."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.algorithms import LossInputs, TokenLoss
from siirl_dask.context import Context
from siirl_dask.coordinator.tensors import packed, values
from siirl_dask.nodes.packing import pack_rows
from siirl_dask.planner import columns
from siirl_dask.schema import (
    ADVANTAGE,
    MINIBATCH,
    OLD_LOGPROBS,
    PROMPT_IDS,
    REFERENCE_LOGPROBS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
)
from siirl_dask.training import TrainBatch, Trainer

_READS = [PROMPT_IDS, RESPONSE_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS, ADVANTAGE, MINIBATCH]


@columns(reads=_READS, optional=[REFERENCE_LOGPROBS])
def update_policy(
    ctx: Context, table: pa.Table, *, loss: Callable[[LossInputs], TokenLoss], minibatches: int
) -> pa.Table:
    """One optimiser step per mini-batch, in order. Every worker of the role takes each of them, rows or not."""
    trainer: Trainer = ctx.resource
    parts = (table.filter(pc.equal(table[MINIBATCH], minibatch)) for minibatch in range(minibatches))
    metrics = trainer.update([_train_batch(part) for part in parts], loss)
    if ctx.rank.rank == 0:  # the trainer's numbers are of all its workers already
        for name, value in metrics.items():
            ctx.log(f"policy/{name}", value)
    return table


def _train_batch(table: pa.Table) -> TrainBatch:
    rows = pack_rows(table)
    reference = packed(table[REFERENCE_LOGPROBS])[0] if REFERENCE_LOGPROBS in table.column_names else None
    return TrainBatch(
        rows=rows.rows,
        old_logprobs=packed(table[OLD_LOGPROBS])[0],
        advantages=rows.spread(values(table[ADVANTAGE])),
        rollout_logprobs=packed(table[ROLLOUT_LOGPROBS])[0],
        reference_logprobs=reference,
    )
