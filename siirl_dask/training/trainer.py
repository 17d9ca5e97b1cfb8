"""What a trainer must do. Rows are packed, one after the other; nothing here names a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from siirl_dask.algorithms.losses import LossFn


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
class TrainBatch:
    """This worker's part of one mini-batch."""

    rows: PackedRows
    old_logprobs: Tensor
    """[K] float32."""
    advantages: Tensor
    """[K] float32."""
    rollout_logprobs: Tensor
    """[K] float32, from the engine that sampled."""
    reference_logprobs: Tensor | None = None
    """[K] float32."""


class Trainer(Protocol):
    """Scores and learns. Every rank of its group makes the same calls in the same order, with or without rows."""

    def logprobs(self, rows: PackedRows) -> TokenScores:
        """Scores of the response tokens under the current weights, without gradient."""
        ...

    def update(self, batches: Sequence[TrainBatch], loss_fn: LossFn) -> dict[str, float]:
        """One optimiser step per mini-batch; the loss is a mean over the mini-batch's response tokens on all ranks.

        Returns metrics averaged over tokens and mini-batches, the same on every rank. TrainingError when the loss or
        the gradient is not finite: no step is taken on such numbers.
        """
        ...

    def weights(self) -> Iterable[tuple[str, Tensor]]:
        """Every parameter, whole, by the name a rollout engine knows it by; tied ones once."""
        ...

    def close(self) -> None: ...
