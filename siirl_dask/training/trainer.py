"""Protocols of policies, critics and reward models, and the packed rows that they take. No
backend is named here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from siirl_dask.algorithms import Aggregation, LossFn, ValueLossFn, token_mean
from siirl_dask.errors import DataError
from siirl_dask.images import Image
from siirl_dask.models.routing import Routing


@dataclass(frozen=True, slots=True)
class ObservedImage:
    """An image that an environment has shown in a row."""

    start: int
    """Place of its first token in the row, prompt and response."""
    image: Image


@dataclass(frozen=True, slots=True)
class RowImages:
    """Images of R rows. The rows of a group show the same ones, so they are here once."""

    groups: Sequence[tuple[Image, ...]]
    """Images in the order of their placeholders; none for text alone."""
    of_row: Tensor
    """[R] int64. Row r shows ``groups[of_row[r]]``. Rows with the same number have equal images in
    equal prompts, also of those that were observed there."""
    observed: Sequence[Sequence[ObservedImage]] = ()
    """Images that each row shows besides, R sequences; none at all where no environment shows any.
    A row in whose prompt they have all placeholders shows no others there."""

    def shows_any(self) -> bool:
        """Return whether any row shows an image."""
        if any(self.groups):
            return True
        return any(self.observed)


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows, each a prompt and its response, concatenated without padding: T tokens, K of them
    in responses.
    """

    tokens: Tensor
    """[T] int64."""
    offsets: Tensor
    """[R + 1] int64. Row r is ``tokens[offsets[r]:offsets[r + 1]]`` (the cu_seqlens of
    variable-length attention)."""
    prompt_lengths: Tensor
    """[R] int64, each at least 1."""
    images: RowImages | None = None
    """Images of the prompts, which have a placeholder for each token of an image. None: no row
    shows any."""
    routes: Tensor | None = None
    """[T, W] int16, the experts that each token goes to, layer after layer; -1 where the model
    chooses itself. None: it chooses everywhere."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)


def with_routes(rows: PackedRows, routing: Routing | None) -> PackedRows:
    """Return rows with the routes that are replayed, and without any where none are.

    DataError for rows without routes that need some, and for routes that are none of the model's.
    """
    if routing is None:
        return replace(rows, routes=None)
    if not len(rows):
        return rows
    if rows.routes is None:
        raise DataError(
            "rollout.router_replay=true, and these rows have no column routed_experts: it comes "
            "from generate, generate_with_greedy and sample_until_mixed; sample with one of them, "
            "or leave router_replay out"
        )
    if rows.routes.shape[1] != routing.width:
        raise DataError(
            f"routed_experts has {rows.routes.shape[1]} experts a token: expected {routing.width}, "
            f"{routing.chosen} in "
            f"each of {len(routing.layers)} layers; were these rows sampled with another model?"
        )
    largest = int(rows.routes.max())
    if largest >= routing.experts:
        raise DataError(
            f"routed_experts names expert {largest}: expected 0 to {routing.experts - 1}"
        )
    return rows


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of every response token, row after row."""

    logprobs: Tensor
    """[K] float32, log-probs at the trainer's temperature."""
    entropy: Tensor
    """[K] float32, entropy in nats of the same distribution."""
    collision: Tensor
    """[K] float32, collision probability of the same distribution: the sum of its squared
    probabilities."""


@dataclass(frozen=True, slots=True)
class EpisodeSpans:
    """Where rows lie in their episodes, whose other rows may be on other workers. Tokens are
    those to learn from.
    """

    starts: Tensor
    """[R] int64, tokens of the row's episode that come before the row's own."""
    lengths: Tensor
    """[R] int64, tokens of the row's episode, in all of its rows in the mini-batch."""

    def select(self, rows: slice | Tensor) -> EpisodeSpans:
        """Return the spans of some of the rows."""
        return EpisodeSpans(self.starts[rows], self.lengths[rows])


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One worker's rows of a mini-batch."""

    rows: PackedRows
    mask: Tensor | None = None
    """[K] bool, True on response tokens to learn from. None: all of them."""
    episodes: EpisodeSpans | None = None
    """Spans of the rows in their episodes, which an aggregation counts. None: each row is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch(Batch):
    """One worker's rows of a mini-batch for a policy."""

    old_logprobs: Tensor
    """[K] float32, log-probs under the policy before this step's first update."""
    advantages: Tensor
    """[K] float32."""
    rollout_logprobs: Tensor
    """[K] float32, log-probs from the engine that sampled."""
    reference_logprobs: Tensor | None = None
    """[K] float32, log-probs under the reference."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[K] each, further columns that a loss asks for, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueBatch(Batch):
    """One worker's rows of a mini-batch for a critic."""

    old_values: Tensor
    """[K] float32, values before this step's first update."""
    returns: Tensor
    """[K] float32, the targets of the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """A mini-batch whose loss or gradient is not finite. Ranks agree on all but ``rows`` and
    ``micro_batches``.
    """

    minibatch: int
    """Its index among those of the update."""
    minibatches: int
    loss: float
    norm: float
    """Norm of the gradient."""
    in_a_row: int
    """Mini-batches in a row that were so, this one included."""
    may_skip: bool
    """Whether ``max_skipped_steps`` allows to leave it out."""
    rows: Mapping[str, Sequence[int]]
    """This rank's rows of the mini-batch by what is not finite: a column of the batch, ``loss``, a
    metric of the loss function, or ``gradient``. With a sharded model the gradient is that of all
    ranks, and has no rows."""
    micro_batches: Sequence[int]
    """Indices of this rank's micro-batches in which the loss or the gradient was not finite
    first."""

    def __str__(self) -> str:
        before = ""
        if self.in_a_row > 1:
            before = f" (the last {self.in_a_row} were so)"
        return (
            f"mini-batch {self.minibatch + 1} of {self.minibatches}: loss {self.loss}, gradient "
            f"norm {self.norm}{before}; no step was taken on it"
        )


OnNonFinite = Callable[[NonFinite], None]
"""Called on every rank, before the optimizer step of a mini-batch that is not finite: when it
returns, the step is left out on all ranks. It may raise on any of them."""


class Trainer(Protocol):
    """A policy that scores and learns. Every rank of the role makes the same calls in order,
    even without rows.
    """

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the current weights, without gradient."""
        ...

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the weights that training began with. TypeError if they
        are gone: they stay only where adapters learn.
        """
        ...

    def average_logprobs(self, rows: PackedRows) -> TokenScores:
        """Score the response tokens under the moving averages of the weights. TypeError where
        none are kept.
        """
        ...

    def update(
        self,
        batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch, on token losses weighted by ``aggregate`` and
        summed over all ranks.

        Every rank returns the same metrics: ``loss``, a mean over steps, and the loss function's
        own, means over tokens. No step is taken where the loss or the gradient is not finite:
        ``on_nonfinite`` is called on every rank, with what was found; without it TrainingError.
        """
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full parameter under the name that a rollout engine has for it; tied ones
        once.
        """
        ...

    def adapters(self) -> Iterable[tuple[str, Tensor]]:
        """Yield A and B of every adapter in full, in float32, by the names of
        ``siirl_dask.models.adapters``; nothing where weights learn themselves.
        """
        ...

    def ema_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the moving averages of the weights like ``weights()``; nothing where none are
        kept.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, for torch.distributed.checkpoint to save and to load in
        place.

        The state is nested dicts of tensors (DTensors where sharded), complete also before the
        first update. ``model`` is ``{name: float32 weight}`` by the names of ``weights()``; where
        adapters learn, the adapters alone. ``optimizer`` is ``{name: {"step", "exp_avg",
        "exp_avg_sq"}}``, of a matrix that Muon steps ``{"momentum_buffer"}``, with ``"ema"`` where
        one is kept. ``progress`` holds counts, one tensor each. Weights and moments are live. A
        state fits any number of ranks and any backend.
        """
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from a state that ``state()`` returned and a checkpoint was loaded into; every
        rank calls.

        Training continues as if it had not stopped, bit for bit on one rank. ValueError for another
        model's state.
        """
        ...

    def close(self) -> None: ...


class ScoresOnly(ABC):
    """The answers of a ``Trainer`` that never learns."""

    @abstractmethod
    def logprobs(self, rows: PackedRows) -> TokenScores:
        """See ``Trainer.logprobs``."""

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        """Score like ``logprobs``: a reference's weights never change."""
        return self.logprobs(rows)

    def average_logprobs(self, rows: PackedRows) -> TokenScores:
        raise TypeError("a reference has no moving averages: give the node the role of a policy")

    def update(
        self,
        batches: Sequence[TrainBatch],
        loss_fn: LossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        raise TypeError(
            "a reference does not learn: build the role with build_trainer instead of "
            "build_reference"
        )


class Critic(Protocol):
    """A model that predicts returns and learns to. Every rank of the role makes the same calls
    in order.
    """

    def values(self, rows: PackedRows) -> Tensor:
        """Predict the return before each response token under the current weights. [K]."""
        ...

    def update(
        self,
        batches: Sequence[ValueBatch],
        loss_fn: ValueLossFn,
        aggregate: Aggregation = token_mean,
        on_nonfinite: OnNonFinite | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch; see ``Trainer.update``."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full parameter by name."""
        ...

    def ema_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the moving averages of the weights; see ``Trainer.ema_weights``."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to resume from; see ``Trainer.state``."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``; see ``Trainer.load_state``."""
        ...

    def close(self) -> None: ...


class RewardModel(Protocol):
    """A model that scores rows and never learns."""

    def scores(self, rows: PackedRows) -> Tensor:
        """Score each row, independent of the rows beside it. [R] float32 on the CPU."""
        ...

    def close(self) -> None: ...


class TextEncoder(Protocol):
    """A model that encodes texts and never learns."""

    def embeddings(self, texts: Sequence[str]) -> Tensor:
        """Encode each text, independent of the texts beside it. [N, D] float32 on the CPU."""
        ...

    def close(self) -> None: ...
