"""The frame of ``data.prepare``: writes a task where the config looks for it, and shows how its warm start gets on."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError

Progress = Callable[[int, int, float], None]
"""Called as ``(step, maximum of steps, what is reached so far)`` during a warm start."""


class WriteTask(Protocol):
    """Writes a task into a folder, and says how its warm start gets on."""

    def __call__(self, folder: Path, /, *, seed: int, progress: Progress) -> object: ...


def prepare_task(config: Config, write: WriteTask, said: str) -> None:
    """Write a task into the folder of ``data.url``, seeded with ``run.seed``.

    ``said`` words how far the warm start is, such as ``finds {:.0%}``. ConfigError without ``data.url``.
    """
    from rich.progress import Progress as Bar

    if config.data.url is None:
        raise ConfigError(f"data.prepare={config.data.prepare} makes one dataset, at data.url; it is not set")
    with Bar(transient=True) as bar:
        task = bar.add_task("warm start, supervised", total=None)

        def show(step: int, maximum: int, reached: float) -> None:
            bar.update(task, description=f"warm start, supervised: step {step}, {said.format(reached)}")

        write(Path(config.data.url).parent, seed=config.run.seed, progress=show)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder beside ``folder``, which takes its place if all goes well."""
    unfinished = folder.with_name(f".{folder.name}")
    yield unfinished
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
