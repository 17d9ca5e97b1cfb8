"""Draws tokens so that a row's sample depends on its seed and its logits, never on the rows beside it.

The random number of a row's t-th token is a hash of (seed, t): no generator has a state that other rows could
advance. It picks the token by inverting the cumulative distribution in float64, which the same logits always send to
the same token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from siirl_dask.rollout.engine import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_BYTES = 64 * 2**20  # of float64 probabilities held at once: 256 rows of a 152k vocabulary would be 300 MB


def uniform(seeds: NDArray[np.uint64], position: int) -> NDArray[np.float64]:
    """A number in [0, 1) for each seed at a token position: splitmix64 of both. [B] -> [B]."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + np.uint64(position + 1) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (https://prng.di.unimi.it/splitmix64.c)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Sampler(LogitsProcessor):
    """Chooses each row's next token inside ``generate`` and keeps it with its log-probability."""

    def __init__(self, seeds: Sequence[int], sampling: Sampling) -> None:
        self._seeds = np.array([seed & (2**64 - 1) for seed in seeds], dtype=np.uint64)
        self._temperature = sampling.temperature
        self._filters = LogitsProcessorList()
        if sampling.temperature > 0 and sampling.top_k > 0:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.temperature > 0 and sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a token for each row and leave only it possible. [B, T], [B, V] -> [B, V]."""
        uniforms = torch.from_numpy(uniform(self._seeds, len(self._tokens))).to(scores.device)
        rows = max(1, _CHUNK_BYTES // (8 * scores.shape[-1]))
        parts = zip(input_ids.split(rows), scores.split(rows), uniforms.split(rows), strict=True)
        drawn = [self._draw(*part) for part in parts]
        tokens = torch.cat([token for token, _ in drawn])
        self._tokens.append(tokens)
        self._logprobs.append(torch.cat([logprob for _, logprob in drawn]))
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def result(self) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, [B, steps] each; rows that ended early go on with meaningless ones."""
        return torch.stack(self._tokens, dim=1).cpu(), torch.stack(self._logprobs, dim=1).float().cpu()

    def _draw(self, input_ids: Tensor, scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        logits = scores / self._temperature if self._temperature > 0 else scores
        logprobs = logits.double().log_softmax(dim=-1)
        if self._temperature > 0:
            tokens = _invert(self._probabilities(input_ids, logits, logprobs), uniforms)
        else:
            tokens = scores.argmax(dim=-1)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)

    def _probabilities(self, input_ids: Tensor, logits: Tensor, logprobs: Tensor) -> Tensor:
        if not self._filters:
            return logprobs.exp()
        kept: Tensor = self._filters(input_ids, logits)  # type: ignore[arg-type]  # it takes any Tensor
        return kept.double().softmax(dim=-1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds the number; never one of probability 0. [B, V], [B] -> [B]."""
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return tokens.clamp(max=probabilities.shape[-1] - 1)  # only nan gets there; the engine refuses its log-probability
