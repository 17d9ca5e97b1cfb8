"""Files of shared memory that processes have mapped, or have left behind."""

import re
import time
from pathlib import Path

_FOLDER = Path("/dev/shm")
_LOOKS = 10
_PAUSE = 0.2  # seconds: others make files before they map them, and remove them after


def mapped_by(pids):
    """Return the names of the files in shared memory that processes have mapped."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text()
        except OSError:  # it has ended, or is another user's
            continue
        found.update(re.findall(rf"{_FOLDER}/(\S+)", maps))
    return found


def those_there(names):
    """Return those of the names that are files in shared memory."""
    return {name for name in names if (_FOLDER / name).exists()}


def unused_files():
    """Return the names of the files in shared memory that no process has mapped: whoever made them
    is gone. Semaphores do not count, which Python's own helper takes away some time after.
    """
    found = {file.name for file in _FOLDER.glob("*") if not file.name.startswith("sem.")}
    return found - mapped_by(path.name for path in Path("/proc").iterdir() if path.name.isdigit())


def left_since(before):
    """Return the names of files that are unused for longer than a moment, and were not ``before``.
    For tests that run alone: others may kill processes at the same time.
    """
    left = unused_files() - before
    for _ in range(_LOOKS):
        if not left:
            break
        time.sleep(_PAUSE)
        left &= unused_files()
    return left
