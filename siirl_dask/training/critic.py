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
from siirl_dask.training.learner import Learner, select_tokens
from siirl_dask.training.model.network import ValueNetwork
from siirl_dask.training.parallel.backend import ModelBackend, full_weights
from siirl_dask.training.parallel.dtensor import copy_state
from siirl_dask.training.trainer import PackedRows, ValueBatch


class ValueCritic:
    """Its head begins at 0, so that it foresees nothing until it has learned to."""

    def __init__(self, backend: ModelBackend, trainer: TrainerConfig, rank: Rank) -> None:
        self._backend = backend
        self._network = backend.network(partial(ValueNetwork, adapters=trainer))
        parameters = self._network.trainable()
        self._learner = Learner(parameters, trainer, rank, device=backend.device, shard_group=backend.shard_group)

    @torch.no_grad()
    def values(self, rows: PackedRows) -> Tensor:
        """[K] float32: before each response token, the reward that is still to come."""
        values = torch.cat([self._network(part) for part in self._backend.micro_batches(rows)]).cpu()
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
        return full_weights(self._network.merged({}), self._backend.device, torch.float32)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The moving averages of the weights, as ``weights()`` gives those; nothing without ``ema_decay``."""
        averages = dict(self._learner.ema())
        named = self._network.merged(averages) if averages else ()
        return full_weights(named, self._backend.device, torch.float32)

    def state(self) -> dict[str, Any]:
        """For its layout see Trainer."""
        return {"model": self._model(), **self._learner.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        copy_state(self._model(), state["model"], "model")
        self._learner.load_state(state)

    def close(self) -> None:
        """Free the weights; nothing can be foreseen or learned any more."""
        del self._network, self._learner

    def _model(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._network.trainable().items()}

    def _losses(self, loss_fn: ValueLossFn, batch: ValueBatch) -> Iterator[tuple[TokenLoss, Tensor]]:
        for part in self._backend.micro_batches(batch.rows):
            values = self._network(part)
            selection = select_tokens(batch, part, values.device)
            inputs = ValueInputs(
                values=selection.from_micro_batch(values),
                old_values=selection.from_batch(batch.old_values),
                returns=selection.from_batch(batch.returns),
                offsets=selection.offsets,
            )
            yield selection.attach(loss_fn(inputs), values), selection.offsets
