"""Builds a task for two agents on the spot: one splits six digits into halves, the other, who sees no more, sorts them.

    Split: 5 2 9 1 4 7 =  ->   2 1 4 | 5 9 7          the low and the high half, as they stand: the first agent
    Sort: 2 1 4 | 5 9 7 =  ->   1 2 4 5 7 9           the second agent

Each has a tiny model of its own, trained on demonstrations until it samples the right line four times in ten. The
reward is joint: 1 where the last line is right. (Judged by greedy answers, a model as good samples the right line one
time in fifty, and two of those never meet.)
"""

from __future__ import annotations

import random
from pathlib import Path

from siirl_dask.config import Config
from siirl_dask.tasks.preparing import Progress, prepare_task, written_whole
from siirl_dask.tasks.sorting import Example, Task, task_in, write_tables

AGENTS = ("a", "b")
DIGITS = 6
_DEMONSTRATIONS = 25_600
_HELD_OUT = 256
_TABLES = {"train": 4096, "validation": 256, "test": 512}


def ask_to_sort(response: str, **others: object) -> str:
    """Return what the second agent is told: the first one's line, and nothing of the digits
    themselves.
    """
    return f"Sort:{response} ="


def write_splitting_task(
    folder: str | Path,
    *,
    seed: int = 0,
    chance: float = 0.4,
    progress: Progress | None = None,
) -> Task:
    """Write the data, and a model in ``a`` and ``b`` each that samples the demonstrated line with
    ``chance``.

    Prompts of demonstrations, training, validation and test are disjoint. ``Task.model`` is the
    first agent's. The training data is written last: its presence means complete.
    """
    from siirl_dask.tasks.tiny_model import tiny_model
    from siirl_dask.tasks.warm_start import warm_start

    order = random.Random(seed)
    sizes = [*_TABLES.values(), _HELD_OUT, _DEMONSTRATIONS]
    numbers = iter(order.sample(range(10**DIGITS), sum(sizes)))
    *tables, held_out, shown = (
        [f"{next(numbers):0{DIGITS}d}" for _ in range(size)] for size in sizes
    )
    task = task_in(folder)
    for place, (name, turn) in enumerate(zip(AGENTS, (_split, _sort), strict=True)):
        model = Path(folder) / name
        with written_whole(model) as unfinished:
            tiny_model(unfinished, seed=seed + place, hidden=128, heads=4, kv_heads=2)
            warm_start(
                unfinished,
                [*map(turn, shown)],
                [*map(turn, held_out)],
                accuracy=chance,
                sampled=True,
                progress=progress,
            )
    write_tables(
        task, {name: [*map(_whole, own)] for name, own in zip(_TABLES, tables, strict=True)}
    )
    return task


def halves(digits: str) -> str:
    """Return the low and the high half of the digits, each in the order in which they stand: ``2
    1 4 | 5 9 7``.
    """
    low = sorted(range(len(digits)), key=lambda at: (digits[at], at))[: len(digits) // 2]
    parts = [
        [digit for at, digit in enumerate(digits) if (at in low) is is_low]
        for is_low in (True, False)
    ]
    return " | ".join(" ".join(part) for part in parts)


def _split(digits: str) -> Example:
    return f"Split: {' '.join(digits)} =", f" {halves(digits)}"


def _sort(digits: str) -> Example:
    return ask_to_sort(response=f" {halves(digits)}"), f" {' '.join(sorted(digits))}"


def _whole(digits: str) -> Example:
    return _split(digits)[0], _sort(digits)[1]


def prepare(config: Config) -> None:
    """Write the task into the folder of ``data.url``, seeded with ``run.seed``: ``data.prepare``
    of the quickstart.
    """
    prepare_task(config, write_splitting_task, "right in {:.0%}")
