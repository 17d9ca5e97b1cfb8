"""Samples with ``model.generate`` of transformers, which runs any causal model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from siirl_dask.config import Sampler
from siirl_dask.errors import ConfigError
from siirl_dask.models.rotary import has_pinned_frequencies
from siirl_dask.rollout.specs import alternatives
from siirl_dask.rollout.transformers_engine.decoding import Choose, padded, rounding, trial_rows


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    ends: frozenset[int],
    pad_token: int,
    choose: Choose,
    cut: Callable[[], bool] | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample as ``decoding.decode`` does, with arguments and results of the same meaning.

    A model with pinned rotary frequencies computes every token anew: transformers drops the cache
    of some of them, such as Phi-3, where a row grows beyond the original context.
    """
    input_ids, mask = padded(prompts, pad_token)
    chosen = _ChosenTokens(choose)
    model.generate(  # type: ignore[operator]
        input_ids.to(model.device),
        attention_mask=mask.to(model.device),
        logits_processor=LogitsProcessorList([chosen]),
        stopping_criteria=StoppingCriteriaList([] if cut is None else [_Cut(cut)]),
        generation_config=GenerationConfig(
            max_new_tokens=max(limits),
            do_sample=False,  # a token is left to choose from
            eos_token_id=sorted(ends) or None,
            pad_token_id=pad_token,
            use_cache=not has_pinned_frequencies(model),
        ),
    )
    return chosen.result()


@torch.inference_mode()
def check_generate(model: PreTrainedModel, path: str) -> None:
    """Raise ConfigError where ``generate`` has other log-probs than plain passes of the model: rows
    of unequal lengths are side by side there, and some models take the padding for tokens. So is a
    model that transformers builds of its config.json, and cannot run.
    """
    try:
        found, expected = _trial_logprobs(model)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # models are written in many ways
        raise ConfigError(
            f"model.path={path!r}: passes of transformers' own over {type(model).__name__} fail: "
            f"{type(failure).__name__}: {failure}; is its config.json that of its makers?"
        ) from failure
    error = float((found - expected.log_softmax(-1)).abs().max())
    if error > rounding(expected, model.dtype):
        raise ConfigError(
            f"model.path={path!r}: transformers' generate gives {type(model).__name__} log-probs "
            f"that are off by {error:.2g} in a batch of prompts of unequal lengths; take "
            f"{alternatives('transformers', lambda able: Sampler.exact in able.samplers)}, or "
            "another model"
        )


def _trial_logprobs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return log-probs of ``generate`` and logits of plain passes, for two tokens after each
    prompt of a trial. [n, 2, V] each.
    """
    prompts = trial_rows(model)
    vocabulary: list[Tensor] = []

    def likeliest(logits: Tensor, rows: NDArray[np.intp], at: int) -> tuple[Tensor, Tensor]:
        logprobs = logits.log_softmax(-1)
        vocabulary.append(logprobs)
        best = logprobs.max(-1)
        return best.indices, best.values

    tokens, _ = generate(
        model,
        prompts,
        limits=[2, 2],
        ends=frozenset(),
        pad_token=0,
        choose=likeliest,
    )
    plain = []
    for prompt, first in zip(prompts, tokens[:, 0].tolist(), strict=True):
        whole = torch.tensor([[*prompt, first]], device=model.device)
        plain.append(model(whole, use_cache=False).logits[0, -2:].float())
    return torch.stack(vocabulary, dim=1), torch.stack(plain)


class _Cut(StoppingCriteria):
    """Ends all rows inside ``generate`` where ``cut()`` says so."""

    def __init__(self, cut: Callable[[], bool]) -> None:
        self._cut = cut

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        """Return whether each row ends. [B, T] -> [B] bool."""
        return torch.full((len(input_ids),), self._cut(), device=input_ids.device)


class _ChosenTokens(LogitsProcessor):
    """Chooses each row's next token inside ``generate`` and keeps it with its log-probability."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose a token for each row and leave it alone to choose from. [B, T], [B, V] float32
        -> [B, V].
        """
        tokens, logprobs = self._choose(scores, np.arange(len(scores)), len(self._tokens))
        self._tokens.append(tokens)
        self._logprobs.append(logprobs)
        return scores.fill_(-torch.inf).scatter_(1, tokens[:, None], 0.0)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probs, [B, steps] each; after its end a row holds
        meaningless ones.
        """
        return torch.stack(self._tokens, dim=1).cpu(), torch.stack(
            self._logprobs, dim=1
        ).float().cpu()
