"""Chooses tokens inside ``transformers``' ``generate``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from siirl_dask.rollout.draw import Draw, as_seed
from siirl_dask.rollout.engine import Sampling


class Sampler(LogitsProcessor):
    """Chooses each row's next token inside ``generate`` and keeps it with its log-probability. ``begun``: tokens of its
    response that each row has already; none, 0.
    """

    def __init__(self, seeds: Sequence[int], sampling: Sampling, begun: Sequence[int] | None = None) -> None:
        self._seeds = np.array([as_seed(seed) for seed in seeds], dtype=np.uint64)
        self._begun = np.array(begun or [0] * len(seeds), dtype=np.uint64)
        self._draw = Draw(sampling)
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record a token for each row and leave only it possible. [B, T], [B, V] -> [B, V]."""
        tokens, logprobs = self._draw(scores, self._seeds, self._begun + np.uint64(len(self._tokens)))
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens[:, None], 0.0)

    def result(self) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probabilities, [B, steps] each; rows that ended early go on with meaningless ones."""
        return torch.stack(self._tokens, dim=1).cpu(), torch.stack(self._logprobs, dim=1).float().cpu()
