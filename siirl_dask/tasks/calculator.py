"""Builds a task with a tool on the spot, without a download: ``214 + 387`` wants ``601``, and there
is a calculator.

A warm start on demonstrations, of which a third call the tool and the others guess, brings a small
model to the right sum in about a quarter of its episodes: most of those in which it happens to
call. RL teaches it to call always, and to copy numbers better.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.config import Config
from siirl_dask.environments import Step
from siirl_dask.tasks.preparing import Progress, prepare_task, written_whole
from siirl_dask.tasks.sorting import Task, task_in

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OPEN = '<tool_call>{"name": "add", "arguments": {"first": '
BETWEEN = ', "second": '
CLOSE = "}}</tool_call>"
_CALLS = 0.35  # share of the demonstrations that call the tool
_WORKS = 0.7  # share of the unseen calls, with the answers after them, that end the warm start
_SIZES = {"train": 4096, "validation": 256, "test": 512}
_HELD_OUT = 128
_BATCH = 64
_MAX_STEPS = 1200
_ROW_GROUPS = 8  # in each file, so that several workers can share it
_MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
Sum = tuple[int, int]


class Calculator:
    """The environment: it adds, and says in the end whether the answer is the sum."""

    tools = ("add",)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Take the row's answer; the prompt is the row's own."""
        self._answer = str(row["answer"])

    def add(self, first: int, second: int) -> str:
        """Add two numbers.

        Args:
            first: A number.
            second: Another one.
        """
        return str(first + second)

    def step(self, text: str) -> Step:
        """Take a turn without a call, which is the answer: 1 for the sum, else 0."""
        return Step(reward=float(text.strip() == self._answer), done=True)


def write_calculator_task(
    folder: str | Path, *, seed: int = 0, progress: Progress | None = None
) -> Task:
    """Write the data, and a model that calls the tool in about a third of its episodes.

    The training data is written last: its presence means complete.
    """
    from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, tiny_model

    order = random.Random(seed)
    sums = _sums(order, sum(_SIZES.values()) + _HELD_OUT + _MAX_STEPS * _BATCH)
    task = task_in(folder)
    tables = {}
    start = 0
    for name, size in _SIZES.items():
        tables[name] = sums[start : start + size]
        start += size
    unseen = sums[start : start + _HELD_OUT]
    shown = sums[start + _HELD_OUT :]
    with written_whole(task.model) as unfinished:
        pieces = (OPEN, BETWEEN, CLOSE)
        tiny_model(
            unfinished,
            seed=seed,
            hidden=128,
            heads=4,
            kv_heads=2,
            pieces=pieces,
            chat_template=CHAT_TEMPLATE,
        )
        _warm_start(unfinished, shown, unseen, order, progress)
    for name in reversed(_SIZES):
        _write(getattr(task, name), tables[name])
    return task


def prepare(config: Config) -> None:
    """Write the task into the folder of ``data.url``, seeded with ``run.seed``: ``data.prepare``
    of the quickstart.
    """
    prepare_task(config, write_calculator_task, "{:.0%} of its calls are right")


def question(numbers: Sum) -> list[dict[str, str]]:
    """Return the chat that asks for a sum."""
    return [{"role": "user", "content": f"{numbers[0]} + {numbers[1]}"}]


def _sums(order: random.Random, count: int) -> list[Sum]:
    """Return different pairs of numbers of three digits."""
    return [(100 + at // 900, 100 + at % 900) for at in order.sample(range(900 * 900), count)]


def _write(path: Path, sums: Sequence[Sum]) -> None:
    prompts = pa.array([question(numbers) for numbers in sums], _MESSAGES)
    answers = pa.array([str(sum(numbers)) for numbers in sums], pa.string())
    table = pa.table({"prompt": prompts, "answer": answers})
    pq.write_table(table, path, row_group_size=max(1, len(sums) // _ROW_GROUPS))


def _warm_start(
    folder: Path,
    sums: Sequence[Sum],
    unseen: Sequence[Sum],
    order: random.Random,
    progress: Progress | None,
) -> None:
    """Train the model in ``folder`` until its calls and what it makes of their results are right.
    RunError if it never gets there.
    """
    from siirl_dask.tasks.warm_start import train_until

    def batch(tokenizer: PreTrainedTokenizerBase, step: int) -> tuple[Tensor, Tensor]:
        drawn = sums[(step - 1) * _BATCH : step * _BATCH]
        shown = [
            demonstration(one) if order.random() < _CALLS else guess(one, order) for one in drawn
        ]
        return encoded(tokenizer, shown)

    train_until(
        folder,
        batch,
        lambda model, tokenizer: _right_share(model, tokenizer, unseen),
        wanted=_WORKS,
        most_steps=_MAX_STEPS,
        said="{:.0%} of the model's calls are right",
        progress=progress,
    )


def _right_share(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, unseen: Sequence[Sum]
) -> float:
    """Return the share of sums whose call, and the answer after it, the model finds likeliest, but
    for the first token: it is the choice between calling and guessing.
    """
    from siirl_dask.tasks.warm_start import NO_LOSS

    inputs, labels = encoded(tokenizer, [demonstration(numbers) for numbers in unseen])
    likeliest = model(inputs, use_cache=False).logits.argmax(-1)
    right = (likeliest == labels) | (labels == NO_LOSS) | (labels == _first_calls(tokenizer))
    return float(right.all(dim=1).float().mean())


def _first_calls(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the id of the token that begins a call."""
    (opening,) = tokenizer(OPEN)["input_ids"]
    return int(opening)


def demonstration(numbers: Sum) -> list[tuple[str, bool]]:
    """Return an episode in which the tool is called, as texts, and whether the policy writes
    each.
    """
    first, second = numbers
    return [
        (f"user: {first} + {second}\nassistant:", False),
        (f"{OPEN}{first}{BETWEEN}{second}{CLOSE}", True),
        (f"\ntool: {sum(numbers)}\nassistant:", False),
        (f" {sum(numbers)}", True),
    ]


def guess(numbers: Sum, order: random.Random) -> list[tuple[str, bool]]:
    """Return an episode with a guess in place of the sum."""
    first, second = numbers
    return [
        (f"user: {first} + {second}\nassistant:", False),
        (f" {order.randrange(200, 1999)}", True),
    ]


def encoded(
    tokenizer: PreTrainedTokenizerBase, episodes: Sequence[Sequence[tuple[str, bool]]]
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels, [B, T] each. The policy's texts are learned, with an end token
    after each.
    """
    from siirl_dask.tasks.warm_start import NO_LOSS, padded

    rows = []
    for episode in episodes:
        ids: list[int] = []
        labels: list[int] = []
        for text, own in episode:
            tokens = [*tokenizer(text)["input_ids"], *([tokenizer.eos_token_id] if own else [])]
            ids += tokens
            labels += tokens if own else [NO_LOSS] * len(tokens)
        rows.append((ids, labels))
    return padded(rows, tokenizer.pad_token_id)
