"""Trains a tiny model on demonstrations until it reaches an accuracy on held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from siirl_dask.errors import RunError
from siirl_dask.models.loading import no_progress_bars

_BATCH = 64
_MAX_STEPS = 400
_LR, _WARMUP, _BETAS = 2e-3, 20, (0.9, 0.98)
_NO_LOSS = -100


def warm_start(
    folder: str | Path,
    demonstrations: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    *,
    accuracy: float,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train the model in ``folder`` until it answers ``accuracy`` of ``held_out``. RunError if it never does."""
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(examples: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        pairs = [(tokenizer(p)["input_ids"], tokenizer(a)["input_ids"] + [tokenizer.eos_token_id]) for p, a in examples]
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        inputs = torch.full((len(pairs), width), tokenizer.pad_token_id)
        labels = torch.full((len(pairs), width), _NO_LOSS)
        for row, (prompt, answer) in enumerate(pairs):
            inputs[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        return inputs[:, :-1], labels[:, 1:]

    unseen = encode(held_out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, betas=_BETAS, weight_decay=0.0, fused=True)
    reached = 0.0
    for step in range(1, _MAX_STEPS + 1):
        start = step * _BATCH % (len(demonstrations) - _BATCH)
        _learn(model, optimizer, encode(demonstrations[start : start + _BATCH]), lr=_LR * min(1.0, step / _WARMUP))
        if step % (10 if reached < accuracy / 2 else 2) == 0:  # it rises from 0.3 to 0.6 within 5 steps
            reached = _accuracy(model, unseen)
            if progress is not None:
                progress(step, _MAX_STEPS, reached)
            if reached >= accuracy:
                break
    else:
        raise RunError(
            f"after {_MAX_STEPS} steps the model answers {reached:.0%} of unseen prompts, expected {accuracy:.0%}"
        )
    with no_progress_bars():
        model.save_pretrained(folder)


def _learn(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], lr: float) -> None:
    inputs, labels = batch
    logits = model(inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=_NO_LOSS)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


@torch.no_grad()
def _accuracy(model: PreTrainedModel, batch: tuple[Tensor, Tensor]) -> float:
    """Return the fraction of rows whose answer tokens are all the likeliest: greedy decoding gets just these right."""
    inputs, labels = batch
    right = (model(inputs, use_cache=False).logits.argmax(-1) == labels) | (labels == _NO_LOSS)
    return float(right.all(dim=1).float().mean())
