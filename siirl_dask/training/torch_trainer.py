"""Plain torch: every worker holds the whole model and learns from its own rows; gradients are summed over workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import LossFn, LossInputs
from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import TrainingError
from siirl_dask.training.gradients import FlatGradients, all_reduce
from siirl_dask.training.network import PackedNetwork
from siirl_dask.training.packing import MicroBatch, micro_batches
from siirl_dask.training.trainer import PackedRows, TokenScores, TrainBatch


class TorchReference:
    """A Trainer that scores and does not learn."""

    def __init__(self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu") -> None:
        self._network = PackedNetwork(model, temperature=temperature, device=device)
        self._network.model.requires_grad_(False)
        self._budget = trainer.max_tokens_per_micro_batch

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Scores of the response tokens under the current weights, without gradient."""
        return self._network.score_all(rows, self._budget)

    def update(self, batches: Sequence[TrainBatch], loss_fn: LossFn) -> dict[str, float]:
        raise TypeError("a reference does not learn: build the role with build_trainer instead of build_reference")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in ``model.dtype``, tied ones once. In float32 they are the live ones: copy what you keep."""
        for name, parameter in self._network.model.named_parameters():
            yield name, parameter.detach().to(self._network.dtype)

    def close(self) -> None:
        """Free the weights; nothing can be scored any more."""
        del self._network


class TorchTrainer(TorchReference):
    """A Trainer with AdamW in float32. Ranks begin with the weights of one folder and stay equal to the last bit."""

    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu", rank: Rank
    ) -> None:
        if rank.size > 1 and rank.group is None:
            raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
        super().__init__(model, trainer, temperature=temperature, device=device)
        self._group = rank.group
        self._config = trainer
        parameters = list(self._network.model.requires_grad_(True).parameters())
        self._gradients = FlatGradients(parameters)
        self._optimizer = torch.optim.AdamW(
            parameters, lr=trainer.lr, betas=trainer.betas, weight_decay=trainer.weight_decay, fused=True
        )
        self._steps = 0

    def update(self, batches: Sequence[TrainBatch], loss_fn: LossFn) -> dict[str, float]:
        """One optimiser step per mini-batch that has response tokens anywhere.

        Metrics: ``loss`` and the loss function's own, means over tokens; ``grad_norm`` before clipping, mean over
        steps; ``lr`` of the last step; ``empty_minibatches`` that were skipped. Without a single token only the last
        two.
        """
        counts = torch.tensor([len(batch.old_logprobs) for batch in batches], dtype=torch.int64)
        counts = all_reduce(counts.to(self._network.device), self._group)
        sums: dict[str, Tensor] = {}
        norms = []
        for at, (batch, count) in enumerate(zip(batches, counts.tolist(), strict=True)):
            if count:
                step_sums, norm = self._step(f"mini-batch {at + 1} of {len(batches)}", batch, count, loss_fn)
                sums = {name: value + sums.get(name, 0.0) for name, value in step_sums.items()}
                norms.append(norm)
        metrics = {name: float(value) / int(counts.sum()) for name, value in sums.items()}
        if norms:
            metrics["grad_norm"] = sum(norms) / len(norms)
        metrics["lr"] = self._optimizer.param_groups[0]["lr"]
        metrics["empty_minibatches"] = float(len(batches) - len(norms))
        return metrics

    def _step(self, which: str, batch: TrainBatch, count: int, loss_fn: LossFn) -> tuple[dict[str, Tensor], float]:
        """Learn from one mini-batch of ``count`` tokens on all ranks. Sums of its metrics over them; gradient norm."""
        self._gradients.zero()
        sums: dict[str, Tensor] = {}
        for part in micro_batches(batch.rows, self._budget):
            logprobs, entropy = self._network.scores(part)
            result = loss_fn(_loss_inputs(batch, part, logprobs, entropy))
            if result.loss.shape != logprobs.shape:
                raise ValueError(
                    f"the loss has shape {list(result.loss.shape)}, expected {list(logprobs.shape)}: a token each"
                )
            if result.loss.requires_grad:
                (result.loss.sum() / count).backward()
            for name, value in {"loss": result.loss, **result.metrics}.items():
                sums[name] = value.detach().double().sum() + sums.get(name, 0.0)
        reduced = all_reduce(torch.stack(list(sums.values())), self._group)
        self._gradients.reduce(self._group)
        norm = self._apply(which, loss=float(reduced[0]) / count)
        return dict(zip(sums, reduced, strict=True)), norm

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


def _loss_inputs(batch: TrainBatch, part: MicroBatch, logprobs: Tensor, entropy: Tensor) -> LossInputs:
    def cut(values: Tensor) -> Tensor:
        return values[part.tokens].to(logprobs.device)

    return LossInputs(
        logprobs=logprobs,
        entropy=entropy,
        old_logprobs=cut(batch.old_logprobs),
        advantages=cut(batch.advantages),
        rollout_logprobs=cut(batch.rollout_logprobs),
        reference_logprobs=None if batch.reference_logprobs is None else cut(batch.reference_logprobs),
        offsets=part.offsets.to(logprobs.device),
    )
