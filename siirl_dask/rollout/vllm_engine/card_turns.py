"""Has the engines of workers that share a card sleep and wake one after the other.

vLLM compares the free memory of the whole card before and after it sleeps, and fails where there is less ("Memory usage
increased after sleeping."): as where the engine of another worker wakes meanwhile, which takes gigabytes.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import ConfigError

_POLL = 0.01  # seconds between two tries; a sleep takes a second


class CardTurns:
    """Turns of one worker on its card. The lock is the kernel's, on a file, and ends with the process that has it."""

    def __init__(self, device: Device) -> None:
        """Take no lock for a card that is ``device``'s alone. ConfigError where no folder is safe for the file."""
        self._waiting = device.waiting
        self._lock: FileLock | None = None
        if device.kind is not DeviceKind.CPU and device.shared_by > 1:
            name = re.sub(r"[^\w-]", "-", device.card)
            self._lock = FileLock(own_folder() / f"card-{name}.lock", poll_interval=_POLL)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Wait until no other worker's engine on the card sleeps or wakes, and keep them waiting meanwhile."""
        if self._lock is None:
            yield
            return
        with self._waiting():
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()


def own_folder() -> Path:
    """Return a folder for temporary files of this user, the same for all processes of the host, made if need be.

    ConfigError where another user could write there, or has made it.
    """
    folder = Path(tempfile.gettempdir()) / f"siirl_dask-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _unsafe(folder, str(error)) from error
    if not stat.S_ISDIR(found.st_mode):
        raise _unsafe(folder, "it is a link")
    if found.st_uid != os.getuid():
        raise _unsafe(folder, f"user {found.st_uid} has made it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise _unsafe(folder, f"its mode is {stat.S_IMODE(found.st_mode):o}")
    return folder


def _unsafe(folder: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{folder}: workers that share a card need a folder of mode 700 that is this user's, and {why}: remove it, or "
        "let TMPDIR name another folder for all workers of the host"
    )
