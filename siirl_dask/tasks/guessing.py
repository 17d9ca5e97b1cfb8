"""Builds a task of several turns on the spot, without a download: one of 16 letters is to be
guessed in four guesses.

The environment answers a wrong guess with ``>`` or ``<``, so that halving what is left finds 15 of
the 16. A warm start on a player that heeds the hints three times in four brings a small model to
find the letter in 40 % of its episodes; a player that always heeds them and chooses evenly finds it
in 58 %. Whoever finds more has learned to halve.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siirl_dask.config import Config
from siirl_dask.environments import Step
from siirl_dask.tasks.preparing import Progress, prepare_task, written_whole
from siirl_dask.tasks.sorting import Task, task_in, write_tables

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LETTERS = "abcdefghijklmnop"
PROMPT = "Guess:"
_GUESSES = 4
# share of its guesses that the player of the warm start chooses among what the hints allow
_HEEDS = 0.75
_BATCH = 64
_MAX_STEPS = 800
_PER_SECRET = 32  # sampled episodes that tell the warm start when to stop
_COPIES = {"train": 256, "validation": 1, "test": 1}  # rows of each letter in the tables


class Guess:
    """The environment: ``answer`` is to be guessed; a wrong guess is answered with the way to
    go.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Take the row's letter; the prompt is the row's own."""
        self._secret = str(row["answer"])

    def step(self, text: str) -> Step | str:
        """Return the hint, or the end with a reward of 1."""
        if text == self._secret:
            return Step(reward=1.0, done=True)
        return hint(self._secret, text)


def hint(secret: str, guess: str) -> str:
    """Return ``>`` where the letter comes after the guess, else ``<``."""
    if secret > guess:
        return ">"
    return "<"


def write_guessing_task(
    folder: str | Path,
    *,
    seed: int = 0,
    success: float = 0.42,
    progress: Progress | None = None,
) -> Task:
    """Write the data, and a model that finds the letter in at least ``success`` of the episodes
    that it samples.

    The training data is written last: its presence means complete.
    """
    from siirl_dask.tasks.tiny_model import tiny_model

    task = task_in(folder)
    with written_whole(task.model) as unfinished:
        tiny_model(unfinished, seed=seed, hidden=128, heads=4, kv_heads=2)
        _warm_start(unfinished, random.Random(seed), success, progress)
    tables = {
        name: [(PROMPT, letter) for _ in range(copies) for letter in LETTERS]
        for name, copies in _COPIES.items()
    }
    write_tables(task, tables)
    return task


def prepare(config: Config) -> None:
    """Write the task into the folder of ``data.url``, seeded with ``run.seed``: ``data.prepare``
    of the quickstart.
    """
    prepare_task(config, write_guessing_task, "finds {:.0%}")


def demonstration(order: random.Random) -> str:
    """Return an episode of the warm start's player: guesses and hints in turn."""
    secret = order.choice(LETTERS)
    low = 0
    high = len(LETTERS)
    text = ""
    for turn in range(_GUESSES):
        allowed = LETTERS
        if order.random() < _HEEDS:
            allowed = LETTERS[low:high]
        guess = order.choice(allowed)
        text += guess
        if guess == secret or turn == _GUESSES - 1:
            break
        text += hint(secret, guess)
        at = LETTERS.index(guess)
        low, high = (max(low, at + 1), high) if secret > guess else (low, min(high, at))
    return text


def _warm_start(
    folder: Path,
    order: random.Random,
    success: float,
    progress: Progress | None,
) -> None:
    """Train the model in ``folder`` until it finds ``success`` of the letters. RunError if it
    never does.
    """
    import torch

    from siirl_dask.tasks.warm_start import train_until

    generator = torch.Generator().manual_seed(order.randrange(2**31))
    train_until(
        folder,
        lambda tokenizer, step: _encoded(tokenizer, [demonstration(order) for _ in range(_BATCH)]),
        lambda model, tokenizer: _success(model, tokenizer, generator),
        wanted=success,
        most_steps=_MAX_STEPS,
        said="the model finds {:.0%} of the letters",
        progress=progress,
    )


def _encoded(tokenizer: PreTrainedTokenizerBase, episodes: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, [B, T] each; only guesses are learned. A token is a character."""
    from siirl_dask.tasks.warm_start import NO_LOSS, padded

    rows = []
    for episode in episodes:
        ids = tokenizer(PROMPT + episode)["input_ids"]
        guessed = range(len(PROMPT), len(ids), 2)
        rows.append((ids, [token if at in guessed else NO_LOSS for at, token in enumerate(ids)]))
    return padded(rows, tokenizer.pad_token_id)


def _success(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generator: Any) -> float:
    """Return the share of sampled episodes, as many of each letter, in which the model finds the
    letter.
    """
    import torch

    secrets = [letter for letter in LETTERS for _ in range(_PER_SECRET)]
    texts = [PROMPT] * len(secrets)
    found = [False] * len(secrets)
    for _ in range(_GUESSES):
        with torch.no_grad():
            logits = model(torch.tensor(tokenizer(texts)["input_ids"]), use_cache=False).logits[
                :, -1
            ]
        drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0].tolist()
        guesses = [str(tokenizer.decode([token])) for token in drawn]
        found = [
            done or guess == secret
            for done, guess, secret in zip(found, guesses, secrets, strict=True)
        ]
        texts = [
            text + (guess if guess in LETTERS and guess else "?") + hint(secret, guess)
            for text, guess, secret in zip(texts, guesses, secrets, strict=True)
        ]
    return sum(found) / len(found)
