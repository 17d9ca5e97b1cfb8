"""Policies that score, and that learn as well, on whatever backend their model is placed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from siirl_dask.algorithms import Aggregation, LossFn, LossInputs, TokenLoss, token_mean
from siirl_dask.config import Dtype, ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.learner import Kept, Learner, kept
from siirl_dask.training.model.network import PolicyNetwork
from siirl_dask.training.parallel.backend import Placement, whole_weights
from siirl_dask.training.parallel.dtensor import put
from siirl_dask.training.trainer import PackedRows, TokenScores, TrainBatch


class Reference:
    """A Trainer that scores and does not learn."""

    def __init__(
        self, placement: Placement, model: ModelConfig, *, temperature: float, adapters: TrainerConfig | None = None
    ) -> None:
        self._placement = placement
        self._dtype = torch.bfloat16 if model.dtype is Dtype.bfloat16 else torch.float32
        make = partial(PolicyNetwork, temperature=temperature, adapters=adapters)
        self._network = placement.network(make).requires_grad_(False)

    @torch.no_grad()
    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Scores of the response tokens under the current weights, without gradient."""
        parts = [self._network(part) for part in self._placement.parts(rows)]
        self._network.reshard()
        logprobs, entropy = (torch.cat(values).cpu() for values in zip(*parts, strict=True))
        return TokenScores(logprobs, entropy)

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        """The same: it is what it began as."""
        return self.logprobs(rows)

    def update(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        raise TypeError("a reference does not learn: build the role with build_trainer instead of build_reference")

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter in ``model.dtype``, tied ones once, with what adapters add to it. What is not sharded and in
        float32 is the live one: copy what you keep.
        """
        return whole_weights(self._network.merged({}), self._placement.device, self._dtype)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Nothing: what does not learn has no averages."""
        return iter(())

    def state(self) -> dict[str, Any]:
        """For its layout see Trainer; of one that does not learn, only ``model`` holds anything."""
        model = {name: parameter.detach() for name, parameter in self._network.trainable().items()}
        return {"model": model, "optimizer": {}, "progress": {}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        put(Reference.state(self)["model"], state["model"], "model")

    def close(self) -> None:
        """Free the weights; nothing can be scored any more."""
        del self._network


class Policy(Reference):
    """A Trainer whose ranks begin with the weights of one folder, and learn together."""

    def __init__(
        self, placement: Placement, model: ModelConfig, trainer: TrainerConfig, rank: Rank, *, temperature: float
    ) -> None:
        super().__init__(placement, model, temperature=temperature, adapters=trainer)
        parameters = self._network.trainable()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self._learner = Learner(parameters, trainer, rank, device=placement.device, shards=placement.shards)

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        """Scores of the response tokens under the weights of the model's folder: without the adapters. TypeError when
        there are none.
        """
        with self._network.without_adapters():
            return self.logprobs(rows)

    def update(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        """One optimiser step per mini-batch; for the metrics see ``Learner.update``."""
        return self._learner.update(batches, partial(self._losses, loss_fn), aggregate)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The moving averages of the weights, as ``weights()`` gives those; nothing without ``ema_decay``."""
        averages = dict(self._learner.ema())
        named = self._network.merged(averages) if averages else ()
        return whole_weights(named, self._placement.device, self._dtype)

    def state(self) -> dict[str, Any]:
        return {**super().state(), **self._learner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self._learner.load_state(state)

    def close(self) -> None:
        """Free the weights; nothing can be scored or learned any more."""
        super().close()
        del self._learner

    def _losses(self, loss_fn: LossFn, batch: TrainBatch) -> Iterator[tuple[TokenLoss, Tensor]]:
        for part in self._placement.parts(batch.rows):
            logprobs, entropy = self._network(part)
            mine = kept(batch, part, logprobs.device)
            yield mine.bound(loss_fn(_loss_inputs(batch, mine, logprobs, entropy)), logprobs), mine.offsets


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
