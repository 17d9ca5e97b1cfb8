"""Draws tokens so that a row's sample depends on its seed and its logits, never on the rows beside it.

The random number of a row's t-th token is a hash of (seed, t): no generator has a state that other rows could
advance. It picks the token by inverting the cumulative distribution in float64, which the same logits always send to
the same token. Engines differ only in where the logits come from.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from siirl_dask.rollout.engine import Sampling

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_CHUNK_BYTES = 64 * 2**20  # of float64 probabilities held at once: 256 rows of a 152k vocabulary would be 300 MB


def as_seed(seed: int) -> int:
    """Return the low 64 bits of any number."""
    return seed & (2**64 - 1)


def uniform(seeds: NDArray[np.uint64], positions: int | NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed at a token position, the hash (splitmix64) of both. [B] -> [B].

    ``positions`` is one number for all seeds, or [B].
    """
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seeds + _GOLDEN) + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (https://prng.di.unimi.it/splitmix64.c)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class TokenSampler:
    """Draws one token per row from logits, with the temperature and the filters of a Sampling."""

    def __init__(self, sampling: Sampling) -> None:
        self._temperature = sampling.temperature
        self._filters = LogitsProcessorList()
        if sampling.temperature == 0:
            return
        if sampling.top_k > 0:
            self._filters.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._filters.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0:
            self._filters.append(MinPLogitsWarper(sampling.min_p))

    def __call__(
        self, logits: Tensor, seeds: NDArray[np.uint64], positions: int | NDArray[np.uint64]
    ) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probs under softmax(logits / temperature). [B, V], [B], [B] -> [B], [B]."""
        uniforms = torch.from_numpy(uniform(seeds, positions)).to(logits.device)
        rows = max(1, _CHUNK_BYTES // (8 * logits.shape[-1]))
        drawn = [self._draw(*part) for part in zip(logits.split(rows), uniforms.split(rows), strict=True)]
        return torch.cat([token for token, _ in drawn]), torch.cat([logprob for _, logprob in drawn])

    def _draw(self, logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        tempered = logits / self._temperature if self._temperature > 0 else logits
        logprobs = tempered.double().log_softmax(dim=-1)
        if self._temperature > 0:
            tokens = _invert(self._probabilities(tempered, logprobs), uniforms)
        else:
            tokens = logits.argmax(dim=-1)
        return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)

    def _probabilities(self, logits: Tensor, logprobs: Tensor) -> Tensor:
        if not self._filters:
            return logprobs.exp()
        kept: Tensor = self._filters(None, logits)  # type: ignore[arg-type]  # these look at no token before
        return kept.double().softmax(dim=-1)


def _invert(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds the number, never one of probability 0.

    [B, V], [B] -> [B].
    """
    cumulative = probabilities.cumsum(dim=-1)
    total = cumulative[:, -1]
    target = torch.minimum(uniforms * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    return tokens.clamp(max=probabilities.shape[-1] - 1)  # only nan gets there; the engine refuses its log-probability
