"""Trains a tiny model on demonstrations until it is as good as the task wants it to begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, PreTrainedModel

from siirl_dask.errors import RunError
from siirl_dask.models.loading import model_class, no_progress_bars

_BATCH = 64
_MAX_STEPS = 400
_LR = 2e-3
_WARMUP = 20
_BETAS = (0.9, 0.98)
NO_LOSS = -100
"""Label of a token that is not learned."""
Shown = tuple[Tensor | Mapping[str, Tensor], Tensor]
"""Inputs and labels, [B, T] each. With images the inputs are all of the model's arguments, by
name."""


def warm_start(
    folder: str | Path,
    demonstrations: Sequence[tuple[str, str]],
    held_out: Sequence[tuple[str, str]],
    *,
    accuracy: float,
    sampled: bool = False,
    progress: Callable[[int, int, float], None] | None = None,
) -> None:
    """Train the model in ``folder`` until it answers ``accuracy`` of ``held_out``. RunError if it
    never does.

    What counts are greedy answers; with ``sampled`` the chance to sample the demonstrated one at
    temperature 1.
    """
    measure = right_share
    if sampled:
        measure = _chance
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(examples: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
        pairs = [
            (tokenizer(p)["input_ids"], tokenizer(a)["input_ids"] + [tokenizer.eos_token_id])
            for p, a in examples
        ]
        return padded([(p + a, [NO_LOSS] * len(p) + a) for p, a in pairs], tokenizer.pad_token_id)

    unseen = encode(held_out)

    def batch(tokenizer: Any, step: int) -> tuple[Tensor, Tensor]:
        start = step * _BATCH % (len(demonstrations) - _BATCH)
        return encode(demonstrations[start : start + _BATCH])

    train_until(
        folder,
        batch,
        lambda model, tokenizer: measure(model, unseen),
        wanted=accuracy,
        most_steps=_MAX_STEPS,
        said="the model answers {:.0%} of unseen prompts",
        progress=progress,
        every=lambda reached: (
            10 if reached < accuracy / 2 else 2
        ),  # it rises from 0.3 to 0.6 within 5 steps
    )


def padded(rows: Sequence[tuple[Sequence[int], Sequence[int]]], pad: int) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, [B, T] each, of rows of token ids and of the label of each,
    ``NO_LOSS`` for some.

    An input's label is the one of the token after it.
    """
    width = max(len(ids) for ids, _ in rows)
    inputs = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids, _ in rows])
    labels = torch.tensor([[*own, *[NO_LOSS] * (width - len(own))] for _, own in rows])
    return inputs[:, :-1], labels[:, 1:]


def train_until(
    folder: str | Path,
    batch: Callable[[Any, int], Shown],
    measure: Callable[[PreTrainedModel, Any], float],
    *,
    wanted: float,
    most_steps: int,
    said: str,
    progress: Callable[[int, int, float], None] | None = None,
    every: Callable[[float], int] = lambda reached: 20,
) -> None:
    """Train the model in ``folder`` on ``batch(tokenizer, step)``, steps from 1.

    It ends when ``measure(model, tokenizer)`` is ``wanted``, and looks after each ``every(what it
    was last)`` steps. RunError, in the words of ``said``, if it never is.
    """
    with no_progress_bars():
        model = model_class(str(folder), f"the model in {folder}").from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=_LR,
        betas=_BETAS,
        weight_decay=0.0,
        fused=True,
    )
    reached = 0.0
    for step in range(1, most_steps + 1):
        _learn(model, optimizer, batch(tokenizer, step), lr=_LR * min(1.0, step / _WARMUP))
        if step % every(reached) == 0:
            with torch.no_grad():
                reached = measure(model, tokenizer)
            if progress is not None:
                progress(step, most_steps, reached)
            if reached >= wanted:
                break
    else:
        raise RunError(f"after {most_steps} steps {said.format(reached)}, expected {wanted:.0%}")
    with no_progress_bars():
        model.save_pretrained(folder)


def _learn(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: Shown,
    lr: float,
) -> None:
    inputs, labels = batch
    logits = _logits(model, inputs)
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LOSS)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def _logits(model: PreTrainedModel, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
    logits: Tensor = model(**given, use_cache=False).logits
    return logits


def right_share(model: PreTrainedModel, batch: Shown) -> float:
    """Return the fraction of rows whose answer tokens are all the likeliest: greedy decoding
    gets just these right.
    """
    inputs, labels = batch
    right = (_logits(model, inputs).argmax(-1) == labels) | (labels == NO_LOSS)
    return float(right.all(dim=1).float().mean())


def _chance(model: PreTrainedModel, batch: Shown) -> float:
    """Return the mean probability of the rows' answers."""
    inputs, labels = batch
    logits = _logits(model, inputs)
    loss = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=NO_LOSS, reduction="none"
    )
    return float(loss.view_as(labels).sum(dim=1).neg().exp().mean())
