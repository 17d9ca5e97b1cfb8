"""The frame of ``data.prepare``: writes a task where the config looks for it, and shows how its
warm start gets on.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError

_SWAPS = 100  # tries to put a folder where other processes put theirs
Progress = Callable[[int, int, float], None]
"""Called as ``(step, maximum of steps, what is reached so far)`` during a warm start."""


class WriteTask(Protocol):
    """Writes a task into a folder, and says how its warm start gets on."""

    def __call__(self, folder: Path, /, *, seed: int, progress: Progress) -> object: ...


def prepare_task(config: Config, write: WriteTask, said: str) -> None:
    """Write a task into the folder of ``data.url``, seeded with ``run.seed``.

    ``said`` words how far the warm start is, such as ``finds {:.0%}``. ConfigError without
    ``data.url``.
    """
    from rich.progress import Progress as Bar

    from siirl_dask.observe import PipeConsole
    from siirl_dask.observe.tenths import Tenths

    if config.data.url is None:
        raise ConfigError(
            f"data.prepare={config.data.prepare} makes one dataset, at data.url; it is not set"
        )
    folder = Path(config.data.url).parent
    console = PipeConsole()
    tenths = Tenths(time.monotonic())
    console.print(
        f"a task and a model for it are built in {folder}, once: some minutes on a laptop",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    with Bar(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("warm start, supervised", total=None)

        def show(step: int, maximum: int, reached: float) -> None:
            bar.update(
                task, description=f"warm start, supervised: step {step}, {said.format(reached)}"
            )
            if not console.is_terminal and tenths.is_due(step, maximum, time.monotonic()):
                console.print(
                    f"warm start  step {step} of at most {maximum}, {said.format(reached)}",
                    soft_wrap=True,
                    markup=False,
                    highlight=False,
                )

        write(folder, seed=config.run.seed, progress=show)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Yield an empty folder's path, which takes the place of ``folder`` if all goes well.

    Several processes may do that at once: each fills a folder of its own, and one of them stays,
    whole.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as aside:
        unfinished = Path(aside) / f".{folder.name}"
        yield unfinished
        for name in map(str, range(_SWAPS)):
            # of the first time, and of another process's moving it away
            with suppress(FileNotFoundError):
                folder.rename(Path(aside) / name)
            try:
                unfinished.rename(folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        raise ConfigError(
            f"{folder} is being written by other processes again and again: {_SWAPS} times in a row"
        )
