"""Builds the quickstart's task on the spot, without a download: ``Sort: 2 9 1 4 1 =`` -> `` 1 1 2 4
9``.

Supervised training on demonstrations brings a small model to sort about half of unseen prompts; RL
takes it from there. The prompts of demonstrations, RL, validation and the final test are disjoint,
so higher accuracy is a gain in skill.

The ``marked`` variant shows RL eliciting a format that the model knows: 35 % of its demonstrations
answer ``#### 1 1 2 4 9``, the rest without the mark, and the reward wants the mark. The digits task
needs no demonstrations: a random model learns to write digits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.config import Config
from siirl_dask.tasks.preparing import Progress, prepare_task, written_whole

if TYPE_CHECKING:
    from siirl_dask.tasks.tiny_model import Family  # it imports torch

MARK = "####"
_MARKED_SHARE = 0.35
_ROW_GROUPS = 8  # in each file, so that several workers can share it
_SIZES = {"train": 4096, "validation": 256, "test": 512}
_HELD_OUT = 256  # unseen examples that tell the warm start when to stop
_SAID = "sorts {:.0%}"

Example = tuple[str, str]
"""A prompt and its answer."""


@dataclass(frozen=True, slots=True)
class Task:
    """The files of a task: a Hugging Face folder, and Parquet files with the columns ``prompt``
    and ``answer``.
    """

    model: Path
    train: Path
    validation: Path
    test: Path


def sorted_digits(prompt: object, response: str, answer: object, **extra: object) -> float:
    """Return 1.0 for the sorted digits and nothing else."""
    return float(response.strip() == str(answer).strip())


def marked_digits(prompt: object, response: str, answer: object, **extra: object) -> float:
    """Return 1.0 for ``####`` and the sorted digits after it."""
    return float(response.strip() == f"{MARK} {str(answer).strip()}")


def digit_fraction(prompt: object, response: str, answer: object, **extra: object) -> float:
    """Return the fraction of digits in a response of 8 tokens."""
    return sum(character in "0123456789" for character in response) / 8


def write_sorting_task(
    folder: str | Path,
    *,
    seed: int = 0,
    digits: int = 5,
    marked: bool = False,
    accuracy: float = 0.5,
    family: Family = "qwen3",
    progress: Progress | None = None,
) -> Task:
    """Write the data, and a model trained on demonstrations until it sorts ``accuracy`` of unseen
    prompts greedily.

    Fewer than 3 ``digits`` give too few prompts. The training data is written last: its presence
    means complete.
    """
    from siirl_dask.tasks.tiny_model import tiny_model
    from siirl_dask.tasks.warm_start import warm_start

    order = random.Random(seed)
    numbers = list(range(10**digits))
    order.shuffle(numbers)
    examples = [_example(f"{number:0{digits}d}") for number in numbers]
    tables, rest = _split(examples)
    demonstrations = [
        (prompt, f" {MARK}{answer}" if marked and order.random() < _MARKED_SHARE else answer)
        for prompt, answer in rest[_HELD_OUT:]
    ]
    task = task_in(folder)
    with written_whole(task.model) as unfinished:
        tiny_model(unfinished, seed=seed, hidden=128, heads=4, kv_heads=2, family=family)
        warm_start(
            unfinished, demonstrations, rest[:_HELD_OUT], accuracy=accuracy, progress=progress
        )
    write_tables(task, tables)
    return task


def write_digits_task(folder: str | Path, *, seed: int = 0) -> Task:
    """Write a random model of 91k parameters and prompts that all ask for digits."""
    from siirl_dask.tasks.tiny_model import tiny_model

    task = task_in(folder)
    tiny_model(task.model, seed=seed)
    tables, _ = _split([(f"Digits {number}:", "") for number in range(sum(_SIZES.values()))])
    write_tables(task, tables)
    return task


def task_in(folder: str | Path) -> Task:
    """Return the paths of a task that lies, or will lie, in a folder."""
    folder = Path(folder)
    return Task(folder / "model", *(folder / f"{name}.parquet" for name in _SIZES))


def _example(digits: str) -> Example:
    return f"Sort: {' '.join(digits)} =", f" {' '.join(sorted(digits))}"


def _split(examples: Sequence[Example]) -> tuple[dict[str, Sequence[Example]], Sequence[Example]]:
    """Return the tables' examples, fewer for each where there are not enough, and the rest."""
    share = min(1.0, len(examples) / (2 * sum(_SIZES.values())))
    tables = {}
    start = 0
    for name, size in _SIZES.items():
        stop = start + int(size * share)
        tables[name] = examples[start:stop]
        start = stop
    return tables, examples[start:]


def write_tables(task: Task, tables: Mapping[str, Sequence[Example]]) -> None:
    """Write the examples of each table, ``train`` last: its presence means that the task is
    complete.
    """
    for name in reversed(_SIZES):
        prompts, answers = zip(*tables[name], strict=True)
        table = pa.table(
            {"prompt": pa.array(prompts, pa.string()), "answer": pa.array(answers, pa.string())}
        )
        pq.write_table(table, getattr(task, name), row_group_size=max(1, len(table) // _ROW_GROUPS))


def prepare(config: Config) -> None:
    """Write the task into the folder of ``data.url``, seeded with ``run.seed``: ``data.prepare``
    of the quickstart.
    """
    prepare_task(config, write_sorting_task, _SAID)


def prepare_mixture(config: Config) -> None:
    """Do the same with a Qwen3-MoE: ``data.prepare`` of configs/quickstart_moe.yaml."""
    prepare_task(config, partial(write_sorting_task, family="qwen3_moe"), _SAID)
