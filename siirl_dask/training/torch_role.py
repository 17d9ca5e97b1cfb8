"""The common part of policies, references and critics: weights, state, and the memory of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from siirl_dask.config import TrainerConfig
from siirl_dask.context import HoldsNoGroups, Rank
from siirl_dask.training.learner import Learner
from siirl_dask.training.model.heads import PolicyNetwork
from siirl_dask.training.model.shared_base import AgentNetwork
from siirl_dask.training.model.value_network import ValueNetwork
from siirl_dask.training.parallel.backend import ModelBackend, full_weights
from siirl_dask.training.parallel.dtensor import copy_state
from siirl_dask.training.parking import ModelMemory, make_parkable


class TorchRole(HoldsNoGroups):
    """A network on a backend, with a Learner where it learns: its weights, its state, and the
    memory of both.
    """

    _network: Any

    def __init__(
        self,
        backend: ModelBackend,
        network: PolicyNetwork | ValueNetwork | AgentNetwork,
        dtype: torch.dtype,
        *,
        park: bool,
    ) -> None:
        """``weights()`` are in ``dtype``. With ``park`` the model is in the host's memory while it
        sleeps.
        """
        self._backend = backend
        self._network = network
        self._dtype = dtype
        self._park = park
        if park:
            make_parkable(network.parameters())
        self._learner: Learner | None = None
        self._memory = ModelMemory(network.parameters(), None, park=park)

    def _learn(
        self,
        trainer: TrainerConfig,
        rank: Rank,
        *,
        waiting: Callable[[], AbstractContextManager[object]],
        cores: int,
    ) -> Learner:
        """Begin to learn the parameters that the network calls trainable. ``waiting()`` is entered
        for what waits for other ranks; ``cores`` as for ``Optimizer``.
        """
        parameters = self._network.trainable()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        learner = Learner(
            parameters,
            trainer,
            rank,
            rates=self._network.rates(),
            shard_ranks=self._backend.shard_ranks,
            matrices=self._network.matrices(),
            waiting=waiting,
            cores=cores,
        )
        self._learner = learner
        self._memory = ModelMemory(self._network.parameters(), learner, park=self._park)
        return learner

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter, adapters merged, tied ones once.

        Parameters that are neither sharded nor converted are live: copy what you keep.
        """
        self._memory.score()
        return full_weights(self._network.merged({}), self._backend.device, self._dtype)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moving averages of the weights like ``weights()``; nothing where none are
        kept.
        """
        if self._learner is None:
            return iter(())
        self._memory.average()
        averages = dict(self._learner.ema())
        named = ()
        if averages:
            named = self._network.merged(averages)
        return full_weights(named, self._backend.device, self._dtype)

    def state(self) -> dict[str, Any]:
        """Return the state of ``Trainer.state``; of what never learns only ``model`` has
        entries.
        """
        learned: dict[str, Any] = {"optimizer": {}, "progress": {}}
        if self._learner is not None:
            learned = self._learner.state()
        parameters = self._network.trainable()
        model = {name: parameter.detach() for name, parameter in parameters.items()}
        state: dict[str, Any] = self._memory.where_it_is({"model": model, **learned})
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; see ``Trainer.load_state``."""
        own = self.state()
        copy_state(own["model"], state["model"], "model")
        if self._learner is not None:
            copy_state(own["optimizer"], state["optimizer"], "optimizer")
            self._learner.resume(state["progress"])
        self._memory.loaded()

    def sleep(self, **unused: bool) -> None:
        """Free device memory while others compute there, with ``park``. Any other call wakes the
        model.
        """
        self._network.reshard()
        self._memory.rest()

    def leave_groups(self) -> bool:
        if self._learner is not None:
            self._learner.leave_group()
        return not self._backend.holds_groups

    def join_groups(self, rank: Rank) -> None:
        if self._learner is not None:
            self._learner.join_group(rank)

    def close(self) -> None:
        """Free the weights; nothing else is possible."""
        self._memory.close()
        del self._network, self._learner, self._memory
