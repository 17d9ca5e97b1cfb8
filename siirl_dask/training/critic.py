"""A critic on any ModelBackend: the policy's architecture with one number per token instead of
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from siirl_dask.algorithms import Aggregation, TokenLoss, ValueInputs, ValueLossFn, token_mean
from siirl_dask.config import TrainerConfig
from siirl_dask.context import HoldsNoGroups, Rank
from siirl_dask.training.learner import Learner, TokenSelection, in_turn, select_tokens
from siirl_dask.training.model.heads import ValueNetwork
from siirl_dask.training.packing import MicroBatch
from siirl_dask.training.parallel.backend import ModelBackend, full_weights
from siirl_dask.training.parallel.dtensor import copy_state
from siirl_dask.training.parking import ModelMemory, make_parkable
from siirl_dask.training.trainer import OnNonFinite, PackedRows, ValueBatch


class ValueCritic(HoldsNoGroups):
    """A Critic whose head begins at 0: every value is 0 until the first update."""

    def __init__(
        self,
        backend: ModelBackend,
        trainer: TrainerConfig,
        rank: Rank,
        *,
        park: bool = False,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        cores: int = 0,
    ) -> None:
        """With ``park`` the critic is in the host's memory while it sleeps; ``waiting()`` is
        entered for what waits for other ranks; ``cores`` as for ``Optimizer``.
        """
        self._backend = backend
        self._network = backend.network(partial(ValueNetwork, trainer=trainer))
        if park:
            make_parkable(self._network.parameters())
        parameters = self._network.trainable()
        rates = self._network.rates()
        self._learner = Learner(
            parameters,
            trainer,
            rank,
            rates=rates,
            shard_ranks=backend.shard_ranks,
            matrices=self._network.matrices(),
            waiting=waiting,
            cores=cores,
        )
        self._memory = ModelMemory(self._network.parameters(), self._learner, park=park)

    @torch.no_grad()
    def values(self, rows: PackedRows) -> Tensor:
        """Predict the return before each response token. [K] float32."""
        self._memory.score()
        parts = self._backend.micro_batches(rows, self._network.inputs)
        values = torch.cat([self._network(part) for part in parts]).cpu()
        self._network.reshard()
        return values

    def update(
        self,
        batches: Sequence[ValueBatch],
        loss_fn: ValueLossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch; see ``Learner.update`` for the metrics."""
        self._memory.begin_update()
        passes = in_turn(partial(self._losses, loss_fn))
        metrics = self._learner.update(batches, passes, aggregate, on_nonfinite)
        self._memory.end_update()
        return metrics

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter of the decoder, adapters merged, and of the ``value_head``.

        Parameters that are not sharded are live: copy what you keep.
        """
        self._memory.score()
        return full_weights(self._network.merged({}), self._backend.device, torch.float32)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moving averages of the weights like ``weights()``; nothing where none are
        kept.
        """
        self._memory.average()
        averages = dict(self._learner.ema())
        named = self._network.merged(averages) if averages else ()
        return full_weights(named, self._backend.device, torch.float32)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, laid out as ``Trainer.state`` says."""
        state: dict[str, Any] = self._memory.where_it_is(
            {"model": self._model(), **self._learner.state()}
        )
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; see ``Trainer.load_state``."""
        own = self.state()
        copy_state(own["model"], state["model"], "model")
        copy_state(own["optimizer"], state["optimizer"], "optimizer")
        self._learner.resume(state["progress"])
        self._memory.loaded()

    def sleep(self, **unused: bool) -> None:
        """Free device memory while others compute there, with ``critic.park``. Any other call
        wakes the critic.
        """
        self._network.reshard()
        self._memory.rest()

    def leave_groups(self) -> bool:
        self._learner.leave_group()
        return not self._backend.holds_groups

    def join_groups(self, rank: Rank) -> None:
        self._learner.join_group(rank)

    def close(self) -> None:
        """Free the weights; predicting and learning are no longer possible."""
        self._memory.close()
        del self._network, self._learner, self._memory

    def _model(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._network.trainable().items()}

    def _losses(
        self, loss_fn: ValueLossFn, batch: ValueBatch
    ) -> Iterator[tuple[TokenLoss, Tensor]]:
        """Yield the losses and row offsets of each micro-batch, as ``Learner.update`` takes them."""
        for part in self._backend.micro_batches(batch.rows, self._network.inputs):
            yield value_losses(loss_fn, batch, part, self._network(part))


def value_losses(
    loss_fn: ValueLossFn, batch: ValueBatch, part: MicroBatch, values: Tensor
) -> tuple[TokenLoss, Tensor]:
    """Return the losses of the selected tokens of a micro-batch, [S], and their row offsets,
    [R + 1]. ``values`` are the critic's, [K].
    """
    selection = select_tokens(batch, part, values.device)
    loss = loss_fn(value_inputs(batch, selection, values))
    return selection.attach(loss, values), selection.offsets


def value_inputs(batch: ValueBatch, selection: TokenSelection, values: Tensor) -> ValueInputs:
    """Return what a loss function gets of a micro-batch's selected tokens. ``values`` [K] are
    the critic's.
    """
    return ValueInputs(
        values=selection.from_micro_batch(values),
        old_values=selection.from_batch(batch.old_values),
        returns=selection.from_batch(batch.returns),
        offsets=selection.offsets,
    )
