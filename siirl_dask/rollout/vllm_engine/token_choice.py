"""Chooses tokens inside vLLM: with the TokenSampler that every engine uses, or with vLLM's own
sampler.

With TokenSampler, vLLM itself samples greedily from what a logits processor leaves: in each row the
chosen token has the only logit above 0, or the highest, 0, which is minus its log-probability. So a
token depends on its row's seed and position alone, whatever else is in the batch and however often
the row was preempted. Its log-probability is that of the tempered distribution before top-p, top-k
and min-p, which vLLM has no name for. The host does not wait for the device here, so that vLLM
prepares the next token while this one is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from siirl_dask.devices import accelerator
from siirl_dask.rollout.engine import Sampling
from siirl_dask.rollout.token_sampling import TokenSampler
from siirl_dask.rollout.vllm_engine.row_parameters import EXACT, ROW, row_parameters


def request_params(
    seed: int,
    sampling: Sampling,
    end_tokens: list[int],
    begun: int = 0,
    mode: str = EXACT,
) -> SamplingParams:
    """Return vLLM's parameters of one row, whose prompt ends with ``begun`` tokens of its response.

    ``mode`` is the engine's ``logprobs_mode``. ConfigError for sampling whose log-probs it does not
    report.
    """
    return SamplingParams(
        flat_logprobs=True,  # lists of numbers, not an object a token
        output_kind=RequestOutputKind.FINAL_ONLY,
        **row_parameters(seed, sampling, end_tokens, begun, mode),
    )


def token_logprobs(reported: FlatLogprobs, mode: str) -> list[float]:
    """Return the log-probs of a response's tokens from what vLLM reports."""
    return [-each for each in reported.logprobs] if mode == EXACT else list(reported.logprobs)


@dataclass(frozen=True, slots=True)
class _Row:
    seed: int
    sampling: Sampling
    begun: int
    """Response tokens at the end of the prompt."""
    tokens: list[int]
    """Tokens generated so far: vLLM's own list, which grows."""

    @property
    def way(self) -> Sampling:
        """The parameters that decide how a token is drawn."""
        return replace(self.sampling, max_tokens=0, stop_token_ids=())


class _Alike:
    """Rows of the batch that are sampled with equal parameters."""

    def __init__(self, rows: dict[int, _Row], way: Sampling) -> None:
        self._draw = TokenSampler(way)
        self._places = list(rows)
        self._places_there: Tensor | None = None
        """The places on the logits' device, copied when they are needed."""
        self._tokens = [row.tokens for row in rows.values()]
        self._seeds = np.array([row.seed for row in rows.values()], dtype=np.uint64)
        self._begun = np.array([row.begun for row in rows.values()], dtype=np.uint64)

    def choose(self, logits: Tensor) -> None:
        """Leave one token of each row that vLLM chooses, with its log-probability. [B, V], in
        place.
        """
        first = self._places[0]
        last = self._places[-1]
        if last - first + 1 == len(self._places):  # neighbours: no copy
            self._mark(logits[first : last + 1])
            return
        if self._places_there is None:
            self._places_there = accelerator.copied_to(logits.device, torch.tensor(self._places))
        scores = logits[self._places_there]
        self._mark(scores)
        logits[self._places_there] = scores

    def _mark(self, scores: Tensor) -> None:
        tokens, logprobs = self._draw(scores, self._seeds, self._positions())
        scores.scatter_(1, tokens[:, None], -logprobs[:, None])

    def _positions(self) -> NDArray[np.uint64]:
        return self._begun + np.array([len(tokens) for tokens in self._tokens], dtype=np.uint64)


class VllmTokenSampler(LogitsProcessor):  # type: ignore[misc]  # to mypy, vLLM's classes are Any
    """A vLLM logits processor; vLLM makes one and tells it which request each row of the batch
    belongs to.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, _Row] = {}
        self._alike: list[_Alike] | None = None

    def is_argmax_invariant(self) -> bool:
        """Return False: the processor decides which token is chosen."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: rows that left, came and moved, in the order that vLLM documents."""
        if batch_update is None:
            return
        self._alike = None
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, tokens in batch_update.added:
            row: dict[str, Any] | None = (params.extra_args or {}).get(ROW)
            self._rows.pop(index, None)
            if row is not None:  # vLLM's own warm-up has none
                self._rows[index] = _Row(
                    row["seed"], Sampling(**row["sampling"]), row["begun"], tokens
                )
        for source, target, direction in batch_update.moved:
            moved = self._rows.pop(source, None)
            replaced = self._rows.pop(target, None)
            if moved is not None:
                self._rows[target] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """Leave one token of each row that vLLM chooses, with its log-probability. [B, V] -> [B,
        V], in place.
        """
        if self._alike is None:
            self._alike = self._grouped()
        for alike in self._alike:
            alike.choose(logits)
        return logits

    def _grouped(self) -> list[_Alike]:
        groups: dict[Sampling, dict[int, _Row]] = {}
        for place, row in sorted(self._rows.items(), key=lambda item: item[0]):
            groups.setdefault(row.way, {})[place] = row
        return [_Alike(rows, way) for way, rows in groups.items()]
