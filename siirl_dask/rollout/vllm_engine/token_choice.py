"""Chooses tokens inside vLLM with the TokenSampler that every engine uses.

vLLM itself samples greedily from what this processor leaves: one token, whose logit is its log-probability. So a token
depends on its row's seed and position alone, whatever else is in the batch and however often the row was preempted. Its
log-probability is that of the tempered distribution before top-p, top-k and min-p, which vLLM has no name for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from siirl_dask.rollout.engine import Sampling
from siirl_dask.rollout.token_sampling import TokenSampler, as_seed

LOGPROBS_MODE = "processed_logits"
"""vLLM's ``logprobs_mode``: it must report the logit that ``apply`` leaves."""
_KEY = "siirl_dask"


def request_params(seed: int, sampling: Sampling, end_tokens: list[int], begun: int = 0) -> SamplingParams:
    """Return vLLM's parameters of one row, whose prompt ends with ``begun`` tokens of its response."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=sampling.max_tokens,
        stop_token_ids=[*end_tokens, *sampling.stop_token_ids],
        ignore_eos=True,  # stop_token_ids has the end tokens
        logprobs=0,  # the chosen token's alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={_KEY: {"seed": as_seed(seed), "sampling": asdict(sampling), "begun": begun}},
    )


@dataclass(frozen=True, slots=True)
class _Row:
    seed: int
    sampling: Sampling
    begun: int
    """Response tokens at the end of the prompt."""
    tokens: list[int]
    """Tokens generated so far: vLLM's own list, which grows."""


class VllmTokenSampler(LogitsProcessor):  # type: ignore[misc]  # to mypy, vLLM's classes are Any
    """A vLLM logits processor; vLLM makes one and tells it which request each row of the batch belongs to."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor decides which token is chosen."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: rows that left, came and moved, in the order that vLLM documents."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, tokens in batch_update.added:
            row: dict[str, Any] | None = (params.extra_args or {}).get(_KEY)
            self._rows.pop(index, None)
            if row is not None:  # vLLM's own warm-up has none
                self._rows[index] = _Row(row["seed"], Sampling(**row["sampling"]), row["begun"], tokens)
        for source, target, direction in batch_update.moved:
            moved, replaced = self._rows.pop(source, None), self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Mask all but one token of each row, and make its log-probability its logit. [B, V] -> [B, V]."""
        alike: dict[Sampling, list[int]] = {}
        for index in sorted(self._rows):
            alike.setdefault(self._rows[index].sampling, []).append(index)
        for sampling, indices in alike.items():
            self._choose(logits, sampling, indices)
        return logits

    def _choose(self, logits: Tensor, sampling: Sampling, indices: list[int]) -> None:
        rows = [self._rows[index] for index in indices]
        positions = np.array([row.begun + len(row.tokens) for row in rows], dtype=np.uint64)
        seeds = np.array([row.seed for row in rows], dtype=np.uint64)
        at = torch.tensor(indices, device=logits.device)
        scores = logits if len(indices) == len(logits) else logits[at]  # all rows are sampled alike: no copy
        tokens, logprobs = TokenSampler(sampling)(scores, seeds, positions)
        logits[at] = -torch.inf
        logits[at, tokens] = logprobs.to(logits.dtype)
