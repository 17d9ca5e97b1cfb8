"""How parameters learn from token losses: a step a mini-batch, on gradients summed over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from siirl_dask.algorithms import Aggregation, TokenLoss, Totals
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import TrainingError
from siirl_dask.training.optimizer import Optimizer, all_reduce
from siirl_dask.training.packing import MicroBatch, response_offsets
from siirl_dask.training.trainer import Batch


@dataclass(frozen=True, slots=True)
class TokenSelection:
    """Which tokens of a micro-batch are learned from."""

    offsets: Tensor
    """[R + 1]: where each row's begin, among them."""
    mask: Tensor | None
    """[K] bool among the micro-batch's tokens; None, all."""
    part: slice
    """Where the micro-batch's tokens lie among those of the batch."""

    def from_micro_batch(self, values: Tensor) -> Tensor:
        """[K of the micro-batch] to those that are kept."""
        return values if self.mask is None else values[self.mask]

    def from_batch(self, values: Tensor) -> Tensor:
        """[K of the whole batch] to those of the micro-batch that are kept, on its device."""
        return self.from_micro_batch(values[self.part].to(self.offsets.device))

    def attach(self, result: TokenLoss, scores: Tensor) -> TokenLoss:
        """The same loss, tied to the model's ``scores`` whatever the loss function made of them: where ranks share a
        model, each must go back through it as often as the others.
        """
        return TokenLoss(loss=result.loss + scores[:0].sum(), metrics=result.metrics)


def select_tokens(batch: Batch, part: MicroBatch, device: torch.device) -> TokenSelection:
    if batch.mask is None:
        return TokenSelection(part.offsets.to(device), None, part.tokens)
    mask = batch.mask[part.tokens]
    return TokenSelection(_kept_before(mask)[part.offsets].to(device), mask.to(device), part.tokens)


def _kept_before(mask: Tensor) -> Tensor:
    """[K] to [K + 1]: how many are kept before each place."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])


_LOSS = "loss"
B = TypeVar("B", bound=Batch)
Losses = Callable[[B], Iterator[tuple[TokenLoss, Tensor]]]
"""Of a batch, one micro-batch after the other: the losses of the tokens kept, [K], and their offsets, [R + 1]."""


class Learner:
    """Ranks begin with equal parameters and stay equal to the last bit."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        rank: Rank,
        *,
        device: torch.device,
        shard_group: Any | None = None,
    ) -> None:
        """``shard_group`` is the process group that each parameter is sharded over, for a model that sums its own
        gradients over ``rank.group``; None where every rank holds the whole model.
        """
        if rank.size > 1 and rank.group is None:
            raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
        self._group, self._shard_group = rank.group, shard_group
        self._config = config
        self._device = device
        self._optimizer = Optimizer(parameters, config)
        self._gradients = self._optimizer.gradients
        self._skipped = 0

    def update(self, batches: Sequence[B], losses: Losses[B], aggregate: Aggregation) -> dict[str, float]:
        """One step per mini-batch that has tokens to learn from anywhere.

        Metrics: ``loss`` and ``grad_norm`` before clipping, means over steps; the loss function's own, means over
        tokens; ``lr`` of the last step; ``empty_minibatches`` and ``skipped_steps`` that were left out. Without a
        single step only the last three.
        """
        counts = torch.tensor([_count(batch) for batch in batches], dtype=torch.int64).reshape(-1, 2)
        totals = [Totals(*count) for count in all_reduce(counts.to(self._device), self._group).tolist()]
        sums: dict[str, float] = {}
        steps: list[tuple[float, float]] = []
        tokens = learned = 0
        for at, (batch, total) in enumerate(zip(batches, totals, strict=True)):
            if total.tokens:
                learned += 1
                step_sums, loss = self._backward(batch, total, losses, aggregate)
                norm = self._norm()
                if not self._may_step(f"mini-batch {at + 1} of {len(batches)}", loss, norm):
                    continue
                self._gradients.clip(norm, self._config.max_grad_norm)
                self._optimizer.step()
                sums = {name: value + sums.get(name, 0.0) for name, value in step_sums.items()}
                steps.append((loss, norm))
                tokens += total.tokens
        metrics = {name: value / tokens for name, value in sums.items()}
        if steps:
            metrics[_LOSS], metrics["grad_norm"] = (sum(values) / len(steps) for values in zip(*steps, strict=True))
        metrics["lr"] = self._optimizer.lr
        metrics["empty_minibatches"] = float(len(batches) - learned)
        metrics["skipped_steps"] = float(learned - len(steps))
        return metrics

    def state(self) -> dict[str, Any]:
        """``optimizer``, the live tensors by parameter name, and ``progress``, numbers as tensors of their own."""
        progress = {"steps": self._optimizer.steps, "skipped_steps": self._skipped}
        return {
            "optimizer": self._optimizer.state(),
            "progress": {name: torch.tensor(value) for name, value in progress.items()},
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state()`` gave, once it holds other numbers. ValueError if it is not of such parameters."""
        progress = {name: int(value) for name, value in state["progress"].items()}
        self._optimizer.load_state(state["optimizer"], progress["steps"])
        self._skipped = progress["skipped_steps"]

    def ema(self) -> Iterator[tuple[str, Tensor]]:
        return self._optimizer.ema()

    def _backward(
        self, batch: B, totals: Totals, losses: Losses[B], aggregate: Aggregation
    ) -> tuple[dict[str, float], float]:
        """Gradients of one mini-batch. Sums of its metrics, and its loss, over all ranks."""
        self._gradients.zero()
        sums: dict[str, Tensor] = {}
        for result, offsets in losses(batch):
            if result.loss.shape != (int(offsets[-1]),):
                raise ValueError(
                    f"the loss has shape {list(result.loss.shape)}, expected [{int(offsets[-1])}]: a token each"
                )
            weighted = (result.loss * aggregate(offsets, totals)).sum()
            if weighted.requires_grad:
                weighted.backward()
            for name, value in {**result.metrics, _LOSS: weighted}.items():
                sums[name] = value.detach().double().sum() + sums.get(name, 0.0)
        reduced = all_reduce(torch.stack(list(sums.values())), self._group)
        values = dict(zip(sums, reduced.tolist(), strict=True))
        loss = values.pop(_LOSS)
        return values, loss

    def _norm(self) -> float:
        """Of the gradients, once they are summed over all ranks."""
        if self._shard_group is None:
            self._gradients.reduce(self._group)
        ranks = 1 if self._shard_group is None else dist.get_world_size(self._shard_group)
        squares = self._gradients.squares(ranks).to(self._device)
        return float(all_reduce(squares, self._shard_group).sqrt())

    def _may_step(self, which: str, loss: float, norm: float) -> bool:
        """Whether the numbers are finite. TrainingError, on every rank alike, when too many in a row were not."""
        if isfinite(norm) and isfinite(loss):
            self._skipped = 0
            return True
        self._skipped += 1
        if self._skipped <= self._config.max_skipped_steps:
            return False
        before = f" (the last {self._skipped} were so)" if self._skipped > 1 else ""
        raise TrainingError(f"{which}: loss {loss}, gradient norm {norm}{before}; no step was taken on it")


def _count(batch: Batch) -> tuple[int, int]:
    """Tokens that are learned from, and rows that have such."""
    offsets = response_offsets(batch.rows)
    if batch.mask is not None:
        if batch.mask.shape != (tokens := int(offsets[-1]),):
            raise ValueError(f"the mask has shape {list(batch.mask.shape)}, expected [{tokens}]: a token each")
        offsets = _kept_before(batch.mask)[offsets]
    lengths = offsets.diff()
    return int(lengths.sum()), int((lengths > 0).sum())
