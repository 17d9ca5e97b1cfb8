"""The Trainer and the Critic of the backend megatron, and its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from siirl_dask.algorithms import Aggregation, LossFn, TokenLoss, ValueLossFn, token_mean
from siirl_dask.context import HoldsNoGroups
from siirl_dask.models.routing import Routing
from siirl_dask.training.critic import value_losses
from siirl_dask.training.learner import policy_losses
from siirl_dask.training.megatron.learner import MegatronLearner
from siirl_dask.training.megatron.replica import Built, Replica
from siirl_dask.training.packing import MicroBatch
from siirl_dask.training.parallel.dtensor import copy_state
from siirl_dask.training.trainer import (
    OnNonFinite,
    PackedRows,
    ScoresOnly,
    TokenScores,
    TrainBatch,
    ValueBatch,
    with_routes,
)

Waiting = Callable[[], AbstractContextManager[object]]


class _Scoring(HoldsNoGroups):
    """A model that scores; what policies, critics and references have in common."""

    def __init__(self, built: Built, *, learns: bool, temperature: float | None) -> None:
        self._replica = Replica(built, learns=learns, temperature=temperature)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter, tied ones once; all ranks of the role must iterate to the
        end.
        """
        return self._replica.weights.full(self._replica.weights.parameters, self._replica.dtype)

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing: there are no adapters."""
        return iter(())

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield nothing where no averages are kept."""
        return iter(())

    def state(self) -> dict[str, Any]:
        """Return the state of ``Trainer.state``: this rank's part of it."""
        return {"model": self._model(), "optimizer": {}, "progress": {}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; see ``Trainer.load_state``."""
        copy_state(self._model(), state["model"], "model")
        self._replica.weights.put(self._replica.weights.parameters, state["model"])
        self._replica.weights.to_stage()

    def sleep(self, **unused: bool) -> None:
        """Keep the model where it is: ``park`` is refused."""

    def leave_groups(self) -> bool:
        return False

    def close(self) -> None:
        """Free the weights; nothing else is possible."""
        del self._replica

    def _model(self) -> dict[str, Tensor]:
        return self._replica.weights.sharded(self._replica.weights.parameters)


class MegatronReference(_Scoring, ScoresOnly):
    """A Trainer that scores and never learns."""

    def __init__(self, built: Built, *, temperature: float) -> None:
        super().__init__(built, learns=False, temperature=temperature)

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the current weights, without gradient."""
        return TokenScores(*self._replica.score(with_routes(rows, None)))


class _Learning(_Scoring):
    """A model that learns as well."""

    def __init__(self, built: Built, *, temperature: float | None, waiting: Waiting) -> None:
        super().__init__(built, learns=True, temperature=temperature)
        self._learner = MegatronLearner(self._replica, built.trainer, waiting=waiting)

    def ema_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the moving averages of the weights like ``weights()``; nothing where none are
        kept.
        """
        averages = dict(self._learner.ema())
        if not averages:
            return iter(())
        return self._replica.weights.full(averages, self._replica.dtype)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, this rank's part of it, laid out as ``Trainer.state``
        says.
        """
        learner = self._learner.state()
        optimizer: dict[str, dict[str, Tensor]] = {
            name: {"step": learner["optimizer"][place.parameter]["step"]}
            for name, place in self._replica.weights.places.items()
            if place.parameter in learner["optimizer"]
        }
        for moment, held in _by_moment(learner["optimizer"]).items():
            for name, part in self._replica.weights.sharded(held).items():
                optimizer[name][moment] = part
        return {"model": self._model(), "optimizer": optimizer, "progress": learner["progress"]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; see ``Trainer.load_state``."""
        copy_state(self.state()["optimizer"], state["optimizer"], "optimizer")
        super().load_state(state)
        for moment, held in _by_moment(self._learner.state()["optimizer"]).items():
            parts = {name: of_name[moment] for name, of_name in state["optimizer"].items()}
            self._replica.weights.put(held, parts)
        self._learner.resume(state["progress"])

    def close(self) -> None:
        """Free the weights; scoring and learning are no longer possible."""
        super().close()
        del self._learner


class MegatronPolicy(_Learning):
    """A Trainer that learns. Its ranks begin with the weights of one folder and learn together."""

    def __init__(
        self,
        built: Built,
        *,
        temperature: float,
        waiting: Waiting = nullcontext,
        routing: Routing | None = None,
    ) -> None:
        """``waiting()`` is entered for what waits for other ranks. With ``routing`` rows must have
        routes, which the model replays; else it chooses experts itself.
        """
        super().__init__(built, temperature=temperature, waiting=waiting)
        self._routing = routing

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the current weights, without gradient."""
        return TokenScores(*self._replica.score(with_routes(rows, self._routing)))

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        raise TypeError("there are no adapters to leave out: trainer.backend=megatron has none")

    def average_logprobs(self, rows: PackedRows) -> TokenScores:
        raise TypeError(
            "trainer.backend=megatron does not score under moving averages: take torch or fsdp"
        )

    def update(
        self,
        batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch; see ``Learner.update`` for the metrics."""

        def evaluate(
            batch: TrainBatch, part: MicroBatch, scores: Sequence[Tensor]
        ) -> tuple[TokenLoss, Tensor]:
            logprobs, entropy, _ = scores
            return policy_losses(loss_fn, batch, part, logprobs, entropy)

        batches = [replace(batch, rows=with_routes(batch.rows, self._routing)) for batch in batches]
        passes = self._replica.passes(evaluate)
        return self._learner.update(batches, passes, aggregate, on_nonfinite)


class MegatronCritic(_Learning):
    """A Critic whose head begins at 0: every value is 0 until the first update."""

    def __init__(self, built: Built, *, waiting: Waiting = nullcontext) -> None:
        """``waiting()`` is entered for what waits for other ranks."""
        super().__init__(built, temperature=None, waiting=waiting)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full parameter of the decoder, and of the ``value_head``, in float32."""
        return self._replica.weights.full(self._replica.weights.parameters, torch.float32)

    def values(self, rows: PackedRows) -> Tensor:
        """Predict the return before each response token. [K] float32."""
        return self._replica.score(with_routes(rows, None))[0]

    def update(
        self,
        batches: Sequence[ValueBatch],
        loss_fn: ValueLossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch; see ``Learner.update`` for the metrics."""

        def evaluate(
            batch: ValueBatch, part: MicroBatch, scores: Sequence[Tensor]
        ) -> tuple[TokenLoss, Tensor]:
            (values,) = scores
            return value_losses(loss_fn, batch, part, values)

        batches = [replace(batch, rows=with_routes(batch.rows, None)) for batch in batches]
        passes = self._replica.passes(evaluate)
        return self._learner.update(batches, passes, aggregate, on_nonfinite)


def _by_moment(optimizer: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Return ``{moment: {parameter: tensor}}`` of an optimizer's state, without counts of steps."""
    found: dict[str, dict[str, Tensor]] = {}
    for parameter, moments in optimizer.items():
        for moment, tensor in moments.items():
            if moment != "step":
                found.setdefault(moment, {})[parameter] = tensor
    return found
