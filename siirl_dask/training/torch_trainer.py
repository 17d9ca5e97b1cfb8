"""Plain torch: every worker holds the whole model and learns from its own rows; gradients are summed over workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import Tensor

from siirl_dask.algorithms import Aggregation, LossFn, LossInputs, TokenLoss, token_mean
from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.learner import Kept, Learner, kept
from siirl_dask.training.network import PackedNetwork
from siirl_dask.training.packing import micro_batches
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

    def update(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        raise TypeError("a reference does not learn: build the role with build_trainer instead of build_reference")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in ``model.dtype``, tied ones once. In float32 they are the live ones: copy what you keep."""
        for name, parameter in self._network.model.named_parameters():
            yield name, parameter.detach().to(self._network.dtype)

    def close(self) -> None:
        """Free the weights; nothing can be scored any more."""
        del self._network


class TorchTrainer(TorchReference):
    """A Trainer whose ranks begin with the weights of one folder and stay equal to the last bit."""

    def __init__(
        self, model: ModelConfig, trainer: TrainerConfig, *, temperature: float, device: str = "cpu", rank: Rank
    ) -> None:
        super().__init__(model, trainer, temperature=temperature, device=device)
        self._learner = Learner(list(self._network.model.requires_grad_(True).parameters()), trainer, rank)

    def update(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        """One optimiser step per mini-batch; for the metrics see ``Learner.update``."""
        return self._learner.update(batches, partial(self._losses, loss_fn), aggregate)

    def close(self) -> None:
        """Free the weights; nothing can be scored or learned any more."""
        super().close()
        del self._learner

    def _losses(self, loss_fn: LossFn, batch: TrainBatch) -> Iterator[tuple[TokenLoss, Tensor]]:
        for part in micro_batches(batch.rows, self._budget):
            logprobs, entropy = self._network.scores(part)
            mine = kept(batch, part, logprobs.device)
            yield loss_fn(_loss_inputs(batch, mine, logprobs, entropy)), mine.offsets


def _loss_inputs(batch: TrainBatch, mine: Kept, logprobs: Tensor, entropy: Tensor) -> LossInputs:
    reference = batch.reference_logprobs
    return LossInputs(
        logprobs=mine.of_part(logprobs),
        entropy=mine.of_part(entropy),
        old_logprobs=mine.of_batch(batch.old_logprobs),
        advantages=mine.of_batch(batch.advantages),
        rollout_logprobs=mine.of_batch(batch.rollout_logprobs),
        reference_logprobs=None if reference is None else mine.of_batch(reference),
        offsets=mine.offsets,
        columns={name: mine.of_batch(values) for name, values in batch.columns.items()},
    )
