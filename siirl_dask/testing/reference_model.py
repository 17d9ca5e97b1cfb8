"""What a model says of its tokens, by a plain forward pass of one row: what engines and trainers are held against."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from siirl_dask.pretrained import no_progress_bars
from siirl_dask.testing.rows import split_rows
from siirl_dask.training import PackedRows, TokenScores


def load_model(folder: Path) -> PreTrainedModel:
    """In float32, ready to be run."""
    with no_progress_bars():
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def response_scores(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probability of every token of the vocabulary at each place of the response. [len(response), V], with
    gradient.
    """
    logits: Tensor = model(torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    return (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)


def response_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probability of each token of the response. [len(response)], with gradient."""
    scores = response_scores(model, prompt, response, temperature)
    return scores.gather(1, torch.tensor(response, dtype=torch.int64)[:, None]).squeeze(1)


def plain_scores(model: PreTrainedModel, rows: PackedRows, temperature: float) -> TokenScores:
    """What a trainer says of the rows, each of them by itself."""
    logprobs, entropy = [], []
    for row, prompt in split_rows(rows):
        given = row[:prompt].tolist(), row[prompt:].tolist()
        scores = response_scores(model, *given, temperature)
        logprobs.append(response_logprobs(model, *given, temperature))
        entropy.append(-(scores.exp() * scores).sum(-1).detach())
    return TokenScores(torch.cat(logprobs), torch.cat(entropy))
