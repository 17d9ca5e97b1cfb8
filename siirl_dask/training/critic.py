"""A critic on any ModelBackend: the policy's architecture with one number per token instead of
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from siirl_dask.algorithms import Aggregation, TokenLoss, ValueInputs, ValueLossFn, token_mean
from siirl_dask.config import TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.training.learner import Learner, TokenSelection, in_turn, select_tokens
from siirl_dask.training.model.value_network import ValueNetwork
from siirl_dask.training.packing import MicroBatch
from siirl_dask.training.parallel.backend import ModelBackend
from siirl_dask.training.torch_role import TorchRole
from siirl_dask.training.trainer import OnNonFinite, PackedRows, ValueBatch


class ValueCritic(TorchRole):
    """A Critic whose head begins at 0: every value is 0 until the first update. ``weights()`` have
    the ``value_head``, and are in float32.
    """

    _network: ValueNetwork

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
        network = backend.network(partial(ValueNetwork, trainer=trainer))
        super().__init__(backend, network, torch.float32, park=park)
        self._learner: Learner = self._learn(trainer, rank, waiting=waiting, cores=cores)

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

    def _losses(
        self, loss_fn: ValueLossFn, batch: ValueBatch
    ) -> Iterator[tuple[TokenLoss, Tensor]]:
        """Yield the losses and row offsets of each micro-batch, as ``Learner.update`` takes them."""
        for part in self._backend.micro_batches(batch.rows, self._network.inputs):
            yield value_losses(loss_fn, batch, part, self._network(part))


def value_losses(
    loss_fn: ValueLossFn,
    batch: ValueBatch,
    part: MicroBatch,
    values: Tensor,
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
