"""Training on token losses: one optimizer step per mini-batch, on gradients summed over
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import isfinite, sqrt
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from siirl_dask.algorithms import (
    Aggregation,
    LossFn,
    LossInputs,
    TokenLoss,
    Totals,
    segment_weights,
)
from siirl_dask.collectives import all_sum
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import TrainingError
from siirl_dask.training.nonfinite import Examination
from siirl_dask.training.optimizer import Optimizer, all_reduce
from siirl_dask.training.packing import MicroBatch, response_offsets
from siirl_dask.training.trainer import Batch, NonFinite, OnNonFinite, TrainBatch


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """The response tokens of a micro-batch that are learned from: S of its K tokens."""

    offsets: Tensor
    """[R + 1]. Row r has the selected tokens ``offsets[r]`` to ``offsets[r + 1]``."""
    mask: Tensor | None
    """[K] bool, True on selected tokens. None: all are selected."""
    part: slice
    """Position of the K tokens among the response tokens of the whole batch."""

    def from_micro_batch(self, values: Tensor) -> Tensor:
        """Select from the micro-batch's numbers. [K] -> [S]."""
        if self.mask is None:
            return values
        return values[self.mask]

    def from_batch(self, values: Tensor) -> Tensor:
        """Select from the whole batch's numbers, and move them to the micro-batch's device.
        [all] -> [S].
        """
        return self.from_micro_batch(values[self.part].to(self.offsets.device))

    def attach(self, result: TokenLoss, scores: Tensor) -> TokenLoss:
        """Return the same loss, with the model's ``scores`` in its graph even if the loss function
        ignored them.

        Ranks that share a model must all run the same number of backward passes.
        """
        return TokenLoss(loss=result.loss + scores[:0].sum(), metrics=result.metrics)


def select_tokens(batch: Batch, part: MicroBatch, device: torch.device) -> TokenSelection:
    """Return the tokens of the micro-batch ``part`` that ``batch.mask`` selects, on ``device``."""
    if batch.mask is None:
        return TokenSelection(part.offsets.to(device), None, part.tokens)
    mask = batch.mask[part.tokens]
    offsets = _count_before(mask)[part.offsets]
    return TokenSelection(offsets.to(device), mask.to(device), part.tokens)


def loss_inputs(
    batch: TrainBatch, selection: TokenSelection, logprobs: Tensor, entropy: Tensor
) -> LossInputs:
    """Return what a loss sees of the selected tokens of a micro-batch, whose scores are [K]
    each.
    """
    reference = batch.reference_logprobs
    return LossInputs(
        logprobs=selection.from_micro_batch(logprobs),
        entropy=selection.from_micro_batch(entropy),
        old_logprobs=selection.from_batch(batch.old_logprobs),
        advantages=selection.from_batch(batch.advantages),
        rollout_logprobs=selection.from_batch(batch.rollout_logprobs),
        reference_logprobs=None if reference is None else selection.from_batch(reference),
        offsets=selection.offsets,
        columns={name: selection.from_batch(values) for name, values in batch.columns.items()},
    )


def policy_losses(
    loss_fn: LossFn,
    batch: TrainBatch,
    part: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
) -> tuple[TokenLoss, Tensor]:
    """Return the losses of the selected tokens of a micro-batch, [S], and their row offsets,
    [R + 1].

    ``logprobs`` and ``entropy`` are the model's scores of all its response tokens, [K] each.
    """
    selection = select_tokens(batch, part, logprobs.device)
    loss = loss_fn(loss_inputs(batch, selection, logprobs, entropy))
    return selection.attach(loss, logprobs), selection.offsets


def _count_before(mask: Tensor) -> Tensor:
    """Count the selected tokens before each position. [K] -> [K + 1]."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])


_LOSS = "loss"
_MAX_SKIPPED = 10  # steps in a row that may be left out, unless max_skipped_steps says otherwise
B = TypeVar("B", bound=Batch)
Losses = Callable[[B], Iterator[tuple[TokenLoss, Tensor]]]
"""Function of a batch that yields, per micro-batch, the losses [S] and row offsets [R + 1] of
its selected tokens."""
See = Callable[[TokenLoss, Tensor], None]
"""Called with the losses and row offsets of each micro-batch after its backward pass."""


class Weighing:
    """Weighs the losses of a mini-batch's micro-batches, one after the other, and adds up what
    is reported of them.
    """

    def __init__(self, batch: Batch, totals: Totals, aggregate: Aggregation) -> None:
        self.sums: dict[str, Tensor] = {}
        """Sums of the loss function's metrics over tokens, and of the weighted loss; [] float64
        each."""
        self._batch = batch
        self._totals = totals
        self._aggregate = aggregate
        self._row = 0

    def __call__(self, result: TokenLoss, offsets: Tensor) -> Tensor:
        """Return the weighted loss of the next micro-batch, with its graph. Its tokens' losses are
        [S], offsets [R + 1]. ValueError for another shape.
        """
        tokens = int(offsets[-1])
        if result.loss.shape != (tokens,):
            raise ValueError(
                f"the loss has shape {list(result.loss.shape)}, expected [{tokens}]: a token each"
            )
        weights = _weights(self._batch, self._row, offsets, self._totals, self._aggregate)
        weighted = (result.loss * weights).sum()
        self._row += len(offsets) - 1
        for name, value in {**result.metrics, _LOSS: weighted}.items():
            self.sums[name] = value.detach().double().sum() + self.sums.get(name, 0.0)
        return weighted


Passes = Callable[[B, Weighing, See | None], None]
"""Does the forward and backward passes of a batch: weighs the losses of each micro-batch, and
sees them."""


def in_turn(losses: Losses[B]) -> Passes[B]:
    """Do the backward pass of each micro-batch right after its forward pass."""

    def passes(batch: B, weigh: Weighing, see: See | None) -> None:
        for result, offsets in losses(batch):
            weighted = weigh(result, offsets)
            if weighted.requires_grad:
                weighted.backward()
            if see is not None:
                see(result, offsets)

    return passes


class Learner:
    """Optimizes a set of parameters. Ranks begin with equal parameters and stay equal bit for
    bit.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        rank: Rank,
        *,
        rates: Mapping[str, float] = MappingProxyType({}),
        shard_ranks: Sequence[int] | None = None,
        stepped: Collection[str] | None = None,
        matrices: Collection[str] = (),
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        cores: int = 0,
    ) -> None:
        """``rates`` are learning rates, in units of the configured one, of parameters that have
        another. ``shard_ranks`` are the ranks of the role that each parameter is sharded over, for
        a model that sums its own gradients over ``rank.group``; None where every rank holds the
        whole model. ``stepped`` are the parameters that this rank steps; None: all. ``waiting()``
        is entered for what waits for other ranks. ``matrices`` and ``cores`` as for ``Optimizer``.
        """
        self._waiting = waiting
        self._group: Any = None
        self._cpu_group: Any = None
        self.join_group(rank)
        self._shard_ranks = shard_ranks
        self._config = config
        self.optimizer = Optimizer(
            parameters, config, rates, stepped, matrices=matrices, cores=cores
        )
        self._gradients = self.optimizer.gradients
        self._skipped = 0

    def update(
        self,
        batches: Sequence[B],
        passes: Passes[B],
        aggregate: Aggregation,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one step per mini-batch that has tokens to learn from on any rank.

        A mini-batch whose loss or gradient is not finite takes none: ``on_nonfinite`` decides what
        follows, and without it TrainingError. Metrics are ``loss`` and ``grad_norm`` (before
        clipping), means over steps; the loss function's own, means over tokens; the last step's
        ``lr``; and the counts ``empty_minibatches`` and ``skipped_steps``. Without a step only the
        last three are there.
        """
        own_counts = [_count(batch) for batch in batches]
        counts = torch.tensor(own_counts, dtype=torch.int64).reshape(-1, 2)
        with self._waiting():
            summed = all_reduce(counts, self._cpu_group).tolist()
        totals = [Totals(tokens=tokens, rows=rows) for tokens, rows in summed]
        sums: dict[str, float] = {}
        steps: list[tuple[float, float]] = []
        tokens = 0
        learned = 0
        for at, (batch, total) in enumerate(zip(batches, totals, strict=True)):
            if not total.tokens:
                continue
            learned += 1
            step_sums, loss = self._backward(batch, total, passes, aggregate)
            norm = self._norm()
            if not isfinite(norm) or not isfinite(loss):
                self._skipped += 1
                seen = (at, len(batches), loss, norm)
                found = self._examine(batch, total, passes, aggregate, seen)
                if on_nonfinite is None:
                    raise TrainingError(str(found))
                on_nonfinite(found)
                continue
            self._skipped = 0
            self._gradients.clip(norm, self._config.max_grad_norm)
            self._step()
            sums = {name: value + sums.get(name, 0.0) for name, value in step_sums.items()}
            steps.append((loss, norm))
            tokens += total.tokens
        metrics = {name: value / tokens for name, value in sums.items()}
        if steps:
            metrics[_LOSS] = sum(loss for loss, _ in steps) / len(steps)
            metrics["grad_norm"] = sum(norm for _, norm in steps) / len(steps)
        metrics["lr"] = self.optimizer.lr
        metrics["empty_minibatches"] = float(len(batches) - learned)
        metrics["skipped_steps"] = float(learned - len(steps))
        return metrics

    def state(self) -> dict[str, Any]:
        """Return ``optimizer``, live tensors by parameter name, and ``progress``, counts as
        tensors.
        """
        progress = {"steps": self.optimizer.steps, "skipped_steps": self._skipped}
        return {
            "optimizer": self.optimizer.state(),
            "progress": {name: torch.tensor(value) for name, value in progress.items()},
        }

    def resume(self, progress: Mapping[str, Any]) -> None:
        """Go on after the counts in ``progress`` of a ``state()`` whose tensors have been
        loaded.
        """
        self.optimizer.steps = int(progress["steps"])
        self._skipped = int(progress["skipped_steps"])

    def leave_group(self) -> None:
        """Let go of the process group; no step can be taken before ``join_group``."""
        self._group = None
        self._cpu_group = None

    def join_group(self, rank: Rank) -> None:
        """Sum gradients over the group of ``rank`` from now on."""
        if rank.size > 1 and rank.group is None:
            raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
        self._group = rank.group
        self._cpu_group = rank.cpu_group

    def ema(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moving average of each parameter; nothing where none is kept."""
        return self.optimizer.ema()

    def _backward(
        self,
        batch: B,
        totals: Totals,
        passes: Passes[B],
        aggregate: Aggregation,
        see: See | None = None,
    ) -> tuple[dict[str, float], float]:
        """Compute the gradients of one mini-batch. Returns the sums of its metrics, and its
        loss, over all ranks.
        """
        self._gradients.zero()
        weigh = Weighing(batch, totals, aggregate)
        passes(batch, weigh, see)
        values = self._total(weigh.sums)
        loss = values.pop(_LOSS)
        return values, loss

    def _step(self) -> None:
        """Update the parameters from their gradients."""
        self.optimizer.step(self._group, self._waiting)

    def _total(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sum each of ``sums`` over all ranks."""
        own = torch.stack(list(sums.values())).tolist()
        with self._waiting():
            reduced = all_sum(self._cpu_group, own)
        return dict(zip(sums, reduced, strict=True))

    def _norm(self) -> float:
        """Sum the gradients over all ranks, if the model has not, and return their norm."""
        if self._shard_ranks is None:
            with self._waiting():
                self._gradients.reduce(self._group)
            return sqrt(float(self._gradients.squares()))
        squares = float(self._gradients.squares(len(self._shard_ranks)))
        with self._waiting():
            (total,) = all_sum(self._cpu_group, [squares], ranks=self._shard_ranks)
        return sqrt(total)

    def _examine(
        self,
        batch: B,
        totals: Totals,
        passes: Passes[B],
        aggregate: Aggregation,
        seen: tuple[int, int, float, float],
    ) -> NonFinite:
        """Do the passes of a mini-batch again, on all ranks, and find what is not finite in them.

        ``seen`` are its index, the number of mini-batches, its loss and the norm of its gradient.
        """
        examination = Examination(batch, self._gradients, sharded=self._shard_ranks is not None)
        self._backward(batch, totals, passes, aggregate, examination.see)
        limit = self._config.max_skipped_steps
        if limit is None:
            limit = _MAX_SKIPPED
        at, count, loss, norm = seen
        return NonFinite(
            minibatch=at,
            minibatches=count,
            loss=loss,
            norm=norm,
            in_a_row=self._skipped,
            may_skip=self._skipped <= limit,
            rows=examination.rows,
            micro_batches=examination.micro_batches,
        )


def _weights(
    batch: Batch,
    first: int,
    offsets: Tensor,
    totals: Totals,
    aggregate: Aggregation,
) -> Tensor:
    """Return the weight of each selected token of the rows from row ``first`` on. [R + 1] ->
    [S].
    """
    if batch.episodes is None:
        return aggregate(offsets, totals)
    rows = batch.episodes.select(slice(first, first + len(offsets) - 1))
    starts = rows.starts.to(offsets.device)
    lengths = rows.lengths.to(offsets.device)
    return segment_weights(aggregate, offsets, totals, starts, lengths)


def _count(batch: Batch) -> tuple[int, int]:
    """Return the number of tokens to learn from, and of the rows or the episodes that have any."""
    offsets = response_offsets(batch.rows)
    if batch.mask is not None:
        tokens = int(offsets[-1])
        if batch.mask.shape != (tokens,):
            raise ValueError(
                f"the mask has shape {list(batch.mask.shape)}, expected [{tokens}]: a token each"
            )
        offsets = _count_before(batch.mask)[offsets]
    lengths = offsets.diff()
    counted = lengths > 0
    if batch.episodes is not None:  # the first row that has tokens counts for its episode
        counted = counted & (batch.episodes.starts == 0)
    return int(lengths.sum()), int(counted.sum())
