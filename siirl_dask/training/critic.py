"""A critic on whatever backend its model is placed: the policy's architecture with one number a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from siirl_dask.algorithms import Aggregation, TokenLoss, ValueInputs, ValueLossFn, token_mean
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.learner import Learner, kept
from siirl_dask.training.model.network import ValueNetwork
from siirl_dask.training.parallel.backend import Placement, whole_weights
from siirl_dask.training.parallel.dtensor import put
from siirl_dask.training.trainer import PackedRows, ValueBatch


class ValueCritic:
    """Its head begins at 0, so that it foresees nothing until it has learned to."""

    def __init__(self, placement: Placement, trainer: TrainerConfig, rank: Rank) -> None:
        self._placement = placement
        self._network = placement.network(partial(ValueNetwork, adapters=trainer))
        parameters = self._network.trainable()
        self._learner = Learner(parameters, trainer, rank, device=placement.device, shards=placement.shards)

    @torch.no_grad()
    def values(self, rows: PackedRows) -> Tensor:
        """[K] float32: before each response token, the reward that is still to come."""
        values = torch.cat([self._network(part) for part in self._placement.parts(rows)]).cpu()
        self._network.reshard()
        return values

    def update(
        self, batches: Sequence[ValueBatch], loss_fn: ValueLossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        """One optimiser step per mini-batch; for the metrics see ``Learner.update``."""
        return self._learner.update(batches, partial(self._losses, loss_fn), aggregate)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the decoder, with what adapters add to it, and of the ``value_head``; what is not sharded
        is live: copy what you keep.
        """
        return whole_weights(self._network.merged({}), self._placement.device, torch.float32)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The moving averages of the weights, as ``weights()`` gives those; nothing without ``ema_decay``."""
        averages = dict(self._learner.ema())
        named = self._network.merged(averages) if averages else ()
        return whole_weights(named, self._placement.device, torch.float32)

    def state(self) -> dict[str, Any]:
        """For its layout see Trainer."""
        return {"model": self._model(), **self._learner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        put(self._model(), state["model"], "model")
        self._learner.load_state(state)

    def close(self) -> None:
        """Free the weights; nothing can be foreseen or learned any more."""
        del self._network, self._learner

    def _model(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._network.trainable().items()}

    def _losses(self, loss_fn: ValueLossFn, batch: ValueBatch) -> Iterator[tuple[TokenLoss, Tensor]]:
        for part in self._placement.parts(batch.rows):
            values = self._network(part)
            mine = kept(batch, part, values.device)
            inputs = ValueInputs(
                values=mine.of_part(values),
                old_values=mine.of_batch(batch.old_values),
                returns=mine.of_batch(batch.returns),
                offsets=mine.offsets,
            )
            yield mine.bound(loss_fn(inputs), values), mine.offsets
