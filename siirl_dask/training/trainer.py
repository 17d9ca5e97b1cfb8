"""What trainers must do. Rows are packed, one after the other; nothing here names a backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from siirl_dask.algorithms import Aggregation, LossFn, ValueLossFn, token_mean


@dataclass(frozen=True, slots=True)
class PackedRows:
    """R rows, prompt and response, one after the other without padding: T tokens, K of them in responses."""

    tokens: Tensor
    """[T] int64."""
    offsets: Tensor
    """[R + 1] int64: row r is ``tokens[offsets[r]:offsets[r + 1]]`` (the cu_seqlens of variable-length attention)."""
    prompt_lengths: Tensor
    """[R] int64, each at least 1."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of every response token, row after row."""

    logprobs: Tensor
    """[K] float32, of the distribution at the trainer's temperature."""
    entropy: Tensor
    """[K] float32, nats, of the same distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """This worker's part of one mini-batch."""

    rows: PackedRows
    mask: Tensor | None = None
    """[K] bool: the response tokens that are learned from; None, all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch(Batch):
    """What a policy learns from."""

    old_logprobs: Tensor
    """[K] float32."""
    advantages: Tensor
    """[K] float32."""
    rollout_logprobs: Tensor
    """[K] float32, from the engine that sampled."""
    reference_logprobs: Tensor | None = None
    """[K] float32."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """[K] each: whatever else a loss asks for, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueBatch(Batch):
    """What a critic learns from."""

    old_values: Tensor
    """[K] float32, before this step's update."""
    returns: Tensor
    """[K] float32, what it is to foresee."""


class Trainer(Protocol):
    """Scores and learns. Every rank of its group makes the same calls in the same order, with or without rows."""

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Scores of the response tokens under the current weights, without gradient."""
        ...

    def base_logprobs(self, rows: PackedRows) -> TokenScores:
        """The same under the weights that training began with. TypeError when they are not there any more: only where
        adapters learn in their place, they are.
        """
        ...

    def update(
        self, batches: Sequence[TrainBatch], loss_fn: LossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        """One optimiser step per mini-batch, on token losses weighted by ``aggregate`` and summed over all ranks.

        Returns the same metrics on every rank: ``loss``, a mean over steps, and the loss function's own, means over
        tokens. TrainingError when the loss or the gradient is not finite: no step is taken on such numbers.
        """
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter, whole, by the name a rollout engine knows it by; tied ones once."""
        ...

    def ema_weights(self) -> Iterable[tuple[str, Tensor]]:
        """The moving averages of the weights, as ``weights()`` gives those; nothing where none are kept."""
        ...

    def state(self) -> dict[str, Any]:
        """All that training goes on from, as torch.distributed.checkpoint saves it and loads it in place: tensors, or
        DTensors where they are sharded, in nested dicts, there in full also before the first update.

        ``model``: ``{name: float32 weight}``, by the names of ``weights()``, or where adapters learn, theirs alone.
        ``optimizer``: ``{name: {"step", "exp_avg", "exp_avg_sq"}}``, and ``"ema"`` where one is kept. ``progress``:
        counts, a tensor each. Weights and moments are the live ones. A state fits any number of ranks and any backend.
        """
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state()`` gave, once it was loaded into; on every rank. Training then goes on as if it had
        not stopped, to the last bit on one rank. ValueError if it is the state of another model.
        """
        ...

    def close(self) -> None: ...


class Critic(Protocol):
    """Foresees reward, and learns to. Its ranks make the same calls in the same order, as a Trainer's."""

    def values(self, rows: PackedRows) -> Tensor:
        """[K]: before each response token, the reward that is still to come, under the current weights."""
        ...

    def update(
        self, batches: Sequence[ValueBatch], loss_fn: ValueLossFn, aggregate: Aggregation = token_mean
    ) -> dict[str, float]:
        """As a Trainer's."""
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter, whole, by name."""
        ...

    def ema_weights(self) -> Iterable[tuple[str, Tensor]]:
        """As a Trainer's."""
        ...

    def state(self) -> dict[str, Any]:
        """As a Trainer's."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """As a Trainer's."""
        ...

    def close(self) -> None: ...


class RewardModel(Protocol):
    """Gives rewards, and never learns."""

    def scores(self, rows: PackedRows) -> Tensor:
        """[R] float32, on the CPU: each row's score, whatever rows are beside it."""
        ...

    def close(self) -> None: ...
