"""Learning over replicas of a model that each lie on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import sqrt
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from siirl_dask.algorithms import Aggregation, Totals
from siirl_dask.config import TrainerConfig
from siirl_dask.training.learner import Learner, Passes
from siirl_dask.training.megatron.divided import DividedParameters
from siirl_dask.training.megatron.replica import Replica
from siirl_dask.training.megatron.rows import joined_batch
from siirl_dask.training.megatron.weights import VALUES
from siirl_dask.training.trainer import Batch, NonFinite, OnNonFinite

B = TypeVar("B", bound=Batch)
_OF_HEADS = ("q_layernorm.weight", "k_layernorm.weight")


class MegatronLearner(Learner):
    """A Learner whose ranks are replicas; the ranks of one learn from the rows of all of them
    together.
    """

    def __init__(
        self,
        replica: Replica,
        config: TrainerConfig,
        *,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """``waiting()`` is entered for what waits for other ranks."""
        grid = self._grid = replica.grid
        self._weights = replica.weights
        self._own: Sequence[slice] = ()
        shards = None
        if grid.ranks * grid.linked != 1:
            shards = range(grid.ranks)
        self._divided = None
        if config.megatron.distributed_optimizer:
            self._divided = DividedParameters(self._weights, grid)
        super().__init__(
            self._weights.parameters,
            config,
            grid.of_replicas(),
            shard_ranks=shards,
            stepped=None if self._divided is None else self._divided.own,
            waiting=waiting,
        )
        self._first_of_experts = len(self._gradients.parts) - replica.weights.experts
        end = sum(part.numel() for part in self._gradients.parts[: self._first_of_experts])
        self._shared = slice(0, end)
        self._of_experts = slice(end, None)

    def update(
        self,
        batches: Sequence[B],
        passes: Passes[B],
        aggregate: Aggregation,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one step per mini-batch, of which each rank gives its own rows; see
        ``Learner.update``.
        """
        with self._waiting():
            joined = [joined_batch(batch, self._grid) for batch in batches]
        self._own = [own for _, own in joined]
        metrics = super().update([batch for batch, _ in joined], passes, aggregate, on_nonfinite)
        self._weights.to_stage()
        return metrics

    def ema(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moving average of each parameter, of which other replicas may have kept some;
        nothing where none is kept. All ranks of the role must call.
        """
        averages = dict(super().ema())
        if self._divided is None or not self._config.keeps_average:
            return iter(averages.items())
        held = {
            name: averages.get(name, torch.empty_like(each))
            for name, each in self._weights.parameters.items()
        }
        with self._waiting():
            self._divided.spread(held)
        return iter(held.items())

    def _step(self) -> None:
        super()._step()
        if self._divided is not None:
            with self._waiting():
                self._divided.spread(self._weights.parameters)

    def _total(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sum over replicas on their last stages, which give the others the result."""
        values = {}
        if self._grid.last:
            values = super()._total(sums)
        with self._waiting():
            return self._grid.from_scores(values)

    def _norm(self) -> float:
        """Put the gradients of all ranks together, and return the norm of those of the model."""
        grid = self._grid
        shared = self._weights.shared_at_ends
        with self._waiting():
            for name, gradient in zip(self._weights.parameters, self._gradients.parts, strict=True):
                if grid.tensor > 1 and self._in_parts(name):
                    dist.all_reduce(gradient, group=grid.tp)
                if name == shared:
                    dist.all_reduce(gradient, group=grid.ends)
            self._gradients.reduce(grid.held_by, self._shared)
            self._gradients.reduce(grid.edp, self._of_experts)
            return sqrt(sum(grid.gather_linked(self._squares())))

    def _in_parts(self, parameter: str) -> bool:
        """Return whether ranks that all have a parameter each have its gradient from their own
        heads or tokens.
        """
        if self._grid.split_tokens:
            if self._weights.is_shared(parameter):
                return False
            return not parameter.startswith(VALUES)
        return parameter.endswith(_OF_HEADS)

    def _squares(self) -> float:
        """Sum the squares of this rank's gradients, each of the model's once: one rank counts
        what several have.
        """
        named = zip(self._weights.parameters, self._gradients.parts, strict=True)
        norms = []
        for at, (name, gradient) in enumerate(named):
            is_of_experts = at >= self._first_of_experts
            counts = self._grid.counts_experts if is_of_experts else self._counts(name)
            if counts:
                norms.append(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not norms:
            return 0.0
        return float(torch.stack(norms).square().sum())

    def _counts(self, parameter: str) -> bool:
        """Return whether this rank counts a parameter that is not one of experts."""
        grid = self._grid
        weights = self._weights
        if grid.replica % grid.linked != 0 or grid.of_tokens != 0:
            return False
        if grid.part != 0 and not weights.is_shared(parameter):
            return False
        if grid.first:
            return True
        return parameter != weights.shared_at_ends

    def _examine(
        self,
        batch: B,
        totals: Totals,
        passes: Passes[B],
        aggregate: Aggregation,
        seen: tuple[int, int, float, float],
    ) -> NonFinite:
        """Find what is not finite in the rows of the replica, and say which of this rank's have
        it.
        """
        found = super()._examine(batch, totals, passes, aggregate, seen)
        rows, micro_batches = self._grid.from_scores((found.rows, found.micro_batches))
        own = self._own[found.minibatch]
        mine = {
            name: [at - own.start for at in places if own.start <= at < own.stop]
            for name, places in rows.items()
        }
        return replace(
            found, rows={name: at for name, at in mine.items() if at}, micro_batches=micro_batches
        )
