"""The Trainers on any ModelBackend: a reference that scores, and a policy that also learns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from siirl_dask.algorithms import Aggregation, LossFn, TokenLoss, token_mean
from siirl_dask.config import ModelConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.models.adapters import is_adapter
from siirl_dask.models.number_type import torch_dtype
from siirl_dask.models.routing import Routing
from siirl_dask.training.learner import Learner, in_turn, policy_losses
from siirl_dask.training.model.heads import PolicyNetwork
from siirl_dask.training.model.shared_base import AgentNetwork
from siirl_dask.training.parallel.backend import ModelBackend, full_weights
from siirl_dask.training.torch_role import TorchRole
from siirl_dask.training.trainer import (
    OnNonFinite,
    PackedRows,
    ScoresOnly,
    TokenScores,
    TrainBatch,
    with_routes,
)


class Reference(TorchRole, ScoresOnly):
    """A Trainer that scores and never learns."""

    _network: PolicyNetwork | AgentNetwork

    def __init__(
        self,
        backend: ModelBackend,
        model: ModelConfig,
        *,
        temperature: float,
        trainer: TrainerConfig | None = None,
        park: bool = False,
        network: AgentNetwork | None = None,
        routing: Routing | None = None,
    ) -> None:
        """With ``park`` the model is in the host's memory while it sleeps. ``trainer`` is that of
        one that learns. ``network`` is there already, and is not the trainer's alone. With
        ``routing`` rows must have routes, which the model replays; else it chooses experts itself.
        """
        self._routing = routing
        used: PolicyNetwork | AgentNetwork
        if network is None:
            make = partial(
                PolicyNetwork,
                temperature=temperature,
                float32_head=model.float32_head,
                trainer=trainer,
                routing=routing,
            )
            used = backend.network(make).requires_grad_(False)
        else:
            used = network
        dtype = torch_dtype(model.dtype, backend.device)
        super().__init__(backend, used, dtype, park=park)

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the current weights, without gradient."""
        return self._score(with_routes(rows, self._routing))

    @torch.no_grad()
    def _score(self, rows: PackedRows) -> TokenScores:
        self._memory.score()
        logprobs = []
        entropy = []
        collision = []
        for part in self._backend.micro_batches(rows, self._network.inputs):
            own_logprobs, own_entropy, own_collision = self._network(part)
            logprobs.append(own_logprobs)
            entropy.append(own_entropy)
            collision.append(own_collision)
        self._network.reshard()
        return TokenScores(
            torch.cat(logprobs).cpu(), torch.cat(entropy).cpu(), torch.cat(collision).cpu()
        )

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full adapter in float32; nothing without adapters. Live as those of
        ``weights()``.
        """
        self._memory.score()
        learned = self._network.trainable()
        adapters = [(name, tensor) for name, tensor in learned.items() if is_adapter(name)]
        return full_weights(adapters, self._backend.device, torch.float32)


class Policy(Reference):
    """A Trainer that learns. Its ranks begin with the weights of one folder and learn together."""

    def __init__(
        self,
        backend: ModelBackend,
        model: ModelConfig,
        trainer: TrainerConfig,
        rank: Rank,
        *,
        temperature: float,
        park: bool = False,
        waiting: Callable[[], AbstractContextManager[object]] = nullcontext,
        cores: int = 0,
        network: AgentNetwork | None = None,
        routing: Routing | None = None,
    ) -> None:
        """With ``park`` the policy is in the host's memory while it sleeps; ``waiting()`` is
        entered for what waits for other ranks; ``cores`` as for ``Optimizer``. ``network`` has the
        adapters that learn, over a base that others hold as well.
        """
        super().__init__(
            backend,
            model,
            temperature=temperature,
            trainer=trainer,
            park=park,
            network=network,
            routing=routing,
        )
        self._keeps_average = trainer.keeps_average
        self._learner: Learner = self._learn(trainer, rank, waiting=waiting, cores=cores)

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens without the adapters, so with the folder's weights, which
        choose experts themselves. TypeError without adapters.
        """
        with self._network.without_adapters():
            return self._score(replace(rows, routes=None))

    def average_logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the moving averages of the weights, which choose experts
        themselves. TypeError where none are kept.
        """
        if not self._keeps_average:
            raise TypeError(
                "no moving averages are kept: set trainer.ema_decay, or trainer.ema_every above 1"
            )
        self._memory.average()
        with self._learner.optimizer.averages_in_use():
            scores = self._score(replace(rows, routes=None))
        self._memory.rest_state()
        return scores

    def update(
        self,
        batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch; see ``Learner.update`` for the metrics."""
        self._memory.begin_update()
        passes = in_turn(partial(self._losses, loss_fn))
        metrics = self._learner.update(batches, passes, aggregate, on_nonfinite)
        self._memory.end_update()
        return metrics

    def _losses(self, loss_fn: LossFn, batch: TrainBatch) -> Iterator[tuple[TokenLoss, Tensor]]:
        """Yield the losses and row offsets of each micro-batch, as ``Learner.update`` takes them."""
        rows = with_routes(batch.rows, self._routing)
        for part in self._backend.micro_batches(rows, self._network.inputs):
            logprobs, entropy, _ = self._network(part)
            yield policy_losses(loss_fn, batch, part, logprobs, entropy)
