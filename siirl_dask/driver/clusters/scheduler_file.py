"""Reads the file to which ``dask scheduler --scheduler-file`` writes the address where it
listens.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from siirl_dask.errors import ConfigError
from siirl_dask.observe import Progress

_INTERVAL = 0.1  # seconds between two looks
_FLUSH = 2.0  # seconds in which a file that is being written becomes whole


def read_address(path: str, timeout: float, progress: Progress) -> str:
    """Return the scheduler's address. Waits up to ``timeout`` seconds for the file: the scheduler
    may be starting.

    ConfigError when the file does not appear, or has another content.
    """
    deadline = time.monotonic() + timeout
    if not Path(path).exists():
        progress.note(
            f"waiting for cluster.scheduler_file={path!r}, up to {timeout:g} s "
            "(cluster.start_timeout)"
        )
    while not Path(path).exists():
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"cluster.scheduler_file={path!r} has not come within "
                f"cluster.start_timeout={timeout:g} s: expected the file that `dask scheduler "
                "--scheduler-file` writes, in a folder that this host shares with it"
            )
        time.sleep(_INTERVAL)
    whole_by = min(time.monotonic() + _FLUSH, deadline)
    while True:
        try:
            return address_in(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() >= whole_by:
                raise ConfigError(
                    f"cluster.scheduler_file={path!r} is none that `dask scheduler "
                    "--scheduler-file` writes: expected "
                    f"JSON with an address, and {type(error).__name__}: {error}"
                ) from error
        time.sleep(_INTERVAL)


def address_in(path: str) -> str:
    """Return the address in a scheduler file that is there. OSError, ValueError, KeyError or
    TypeError if it is not.
    """
    address = json.loads(Path(path).read_text())["address"]
    if not isinstance(address, str):
        raise TypeError(f"address={address!r} is no text")
    return address
