"""How parameters learn from token losses: AdamW in float32, on gradients summed over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TypeVar

import torch
from torch import Tensor, nn

from siirl_dask.algorithms import Aggregation, TokenLoss, Totals
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import TrainingError
from siirl_dask.training.gradients import FlatGradients, all_reduce
from siirl_dask.training.packing import MicroBatch, response_offsets
from siirl_dask.training.trainer import Batch


@dataclass(frozen=True, slots=True)
class Kept:
    """Which tokens of a micro-batch are learned from."""

    offsets: Tensor
    """[R + 1]: where each row's begin, among them."""
    mask: Tensor | None
    """[K] bool among the micro-batch's tokens; None, all."""
    part: slice
    """Where the micro-batch's tokens lie among those of the batch."""

    def of_part(self, values: Tensor) -> Tensor:
        """[K of the micro-batch] to those that are kept."""
        return values if self.mask is None else values[self.mask]

    def of_batch(self, values: Tensor) -> Tensor:
        """[K of the whole batch] to those of the micro-batch that are kept, on its device."""
        return self.of_part(values[self.part].to(self.offsets.device))


def kept(batch: Batch, part: MicroBatch, device: torch.device) -> Kept:
    if batch.mask is None:
        return Kept(part.offsets.to(device), None, part.tokens)
    mask = batch.mask[part.tokens]
    return Kept(_kept_before(mask)[part.offsets].to(device), mask.to(device), part.tokens)


def _kept_before(mask: Tensor) -> Tensor:
    """[K] to [K + 1]: how many are kept before each place."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), mask.cumsum(0)])


_LOSS = "loss"
B = TypeVar("B", bound=Batch)
Losses = Callable[[B], Iterator[tuple[TokenLoss, Tensor]]]
"""Of a batch, one micro-batch after the other: the losses of the tokens kept, [K], and their offsets, [R + 1]."""


class Learner:
    """Ranks begin with equal parameters and stay equal to the last bit."""

    def __init__(self, parameters: Sequence[nn.Parameter], config: TrainerConfig, rank: Rank) -> None:
        if rank.size > 1 and rank.group is None:
            raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
        self._group = rank.group
        self._config = config
        self._device = parameters[0].device
        self._gradients = FlatGradients(parameters)
        self._optimizer = torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )
        self._steps = 0

    def update(self, batches: Sequence[B], losses: Losses[B], aggregate: Aggregation) -> dict[str, float]:
        """One step per mini-batch that has tokens to learn from anywhere.

        Metrics: ``loss`` and ``grad_norm`` before clipping, means over steps; the loss function's own, means over
        tokens; ``lr`` of the last step; ``empty_minibatches`` that were skipped. Without a single token only the last
        two.
        """
        counts = torch.tensor([_count(batch) for batch in batches], dtype=torch.int64).reshape(-1, 2)
        totals = [Totals(*count) for count in all_reduce(counts.to(self._device), self._group).tolist()]
        sums: dict[str, float] = {}
        steps: list[tuple[float, float]] = []
        for at, (batch, total) in enumerate(zip(batches, totals, strict=True)):
            if total.tokens:
                which = f"mini-batch {at + 1} of {len(batches)}"
                step_sums, loss = self._backward(batch, total, losses, aggregate)
                sums = {name: value + sums.get(name, 0.0) for name, value in step_sums.items()}
                steps.append((loss, self._apply(which, loss)))
        tokens = sum(total.tokens for total in totals)
        metrics = {name: value / tokens for name, value in sums.items()}
        if steps:
            metrics[_LOSS], metrics["grad_norm"] = (sum(values) / len(steps) for values in zip(*steps, strict=True))
        metrics["lr"] = self._optimizer.param_groups[0]["lr"]
        metrics["empty_minibatches"] = float(len(batches) - len(steps))
        return metrics

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
        self._gradients.reduce(self._group)
        values = dict(zip(sums, reduced.tolist(), strict=True))
        loss = values.pop(_LOSS)
        return values, loss

    def _apply(self, which: str, loss: float) -> float:
        """Step along the summed gradients and return their norm; TrainingError, on every rank alike, if not finite."""
        norm = self._gradients.norm()
        if not (isfinite(norm) and isfinite(loss)):
            raise TrainingError(f"{which}: loss {loss}, gradient norm {norm}; no step was taken on it")
        self._gradients.clip(norm, self._config.max_grad_norm)
        self._steps += 1
        lr = self._config.lr * min(1.0, self._steps / max(1, self._config.warmup_steps))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        return norm


def _count(batch: Batch) -> tuple[int, int]:
    """Tokens that are learned from, and rows that have such."""
    offsets = response_offsets(batch.rows)
    if batch.mask is not None:
        if batch.mask.shape != (tokens := int(offsets[-1]),):
            raise ValueError(f"the mask has shape {list(batch.mask.shape)}, expected [{tokens}]: a token each")
        offsets = _kept_before(batch.mask)[offsets]
    lengths = offsets.diff()
    return int(lengths.sum()), int((lengths > 0).sum())
