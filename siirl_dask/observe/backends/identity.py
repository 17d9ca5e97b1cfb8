"""The id by which backends of metrics know a run: ``tracking.json`` in the run's folder.

It stays while the run goes on in one place, or is moved. A copy gets another one, or both would write
into one run of the backends. From another machine a move and a copy look alike, so that is taken for
a copy: a run that is recorded in two parts can be put together, and two in one cannot be taken apart.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from uuid import uuid4

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import absolute, join, open_fs, write_atomic

from siirl_dask.wording import redacted

_FILE = "tracking.json"


@dataclass(frozen=True, slots=True)
class TrackedIdentity:
    """The id of a run, and how it came about."""

    id: str
    """21 lower-case hexadecimal digits."""
    note: str | None = None
    """A sentence where the run has another id than it had elsewhere."""


@dataclass(frozen=True, slots=True)
class _TrackedPlace:
    """The content of ``tracking.json``: an id, and where the run was at its last start."""

    id: str
    url: str = ""
    """Empty in a file of an earlier version."""
    host: str = ""
    """Name of the machine; empty for a store, and in a file of an earlier version."""
    inode: int = 0
    """Number of the folder in its file system; 0 where ``host`` is empty."""


def identify(url: str, *, new: bool) -> TrackedIdentity:
    """Return the id of the run at ``url`` for backends; ``new`` makes another one. So does the first
    start of a copy: of a run that is still where it was, or was on another machine or in a store
    that cannot be read from here.
    """
    here = _place(uuid4().hex[:21], url)  # SwanLab's length; the others take any
    known = None
    if not new:
        known = _read(url)
    if known is None:
        _write(here, url)
        return TrackedIdentity(here.id)
    if not known.url or _is_same(known, here, url):
        _write(_place(known.id, url), url)
        return TrackedIdentity(known.id)
    is_there = _is_still_there(known, url)
    if is_there is False:
        _write(_place(known.id, url), url)
        return TrackedIdentity(known.id)
    _write(here, url)
    where = known.url
    if known.host and known.host != here.host:
        where += f" on {known.host}"
    reason = f"its folder is a copy of the one at {where}"
    if is_there is None:
        reason = f"it was at {where} at its last start, and may go on there"
    return TrackedIdentity(
        here.id,
        f"for backends of metrics this is another run, with the steps so far: {reason}. To go on "
        f"with the earlier one, stop this start and write {known.id!r} as id into "
        f"{redacted(join(url, _FILE))}",
    )


def _place(name: str, url: str) -> _TrackedPlace:
    """Return where the run at ``url`` is now, whose folder is made if it is not there."""
    here = redacted(absolute(url))
    fs, path = open_fs(url)
    if not isinstance(fs, LocalFileSystem):
        return _TrackedPlace(name, here)
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return _TrackedPlace(name, here, socket.gethostname(), folder.stat().st_ino)


def _is_same(known: _TrackedPlace, here: _TrackedPlace, url: str) -> bool:
    """Return whether two places are one: the same URL, unless it is a local disk's of another
    machine.
    """
    if known.url != here.url:
        return False
    if known.host in ("", here.host) or known.inode == here.inode:
        return True
    # a file system that several machines share has no block device of this machine
    _, folder = open_fs(url)
    return os.major(Path(folder).stat().st_dev) == 0


def _is_still_there(known: _TrackedPlace, url: str) -> bool | None:
    """Return whether the run whose record is at ``url`` is also where it was, and not by another
    name of the same folder; None where that place cannot be read, as another machine's disk.
    """
    if known.host not in ("", socket.gethostname()):
        return None
    try:
        there = _read(known.url)
    except Exception:  # each store has errors of its own
        return None
    if there is None or there.id != known.id:
        return False
    there_file = Path(absolute(known.url), _FILE)
    here_file = Path(absolute(url), _FILE)
    if there_file.exists() and here_file.exists():  # and not in a store
        return not there_file.samefile(here_file)
    return True


def _read(url: str) -> _TrackedPlace | None:
    """Return what the run at ``url`` has recorded; None where that is nothing usable."""
    fs, path = open_fs(join(url, _FILE))
    try:
        found = json.loads(fs.cat_file(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    match found:
        case {"id": str(name)} if re.fullmatch("[0-9a-f]{21}", name):
            match found:
                case {"url": str(place), "host": str(host), "inode": int(inode)}:
                    return _TrackedPlace(name, place, host, inode)
                case {"url": str(place)}:
                    return _TrackedPlace(name, place)
            return _TrackedPlace(name)
    return None


def _write(place: _TrackedPlace, url: str) -> None:
    fs, path = open_fs(join(url, _FILE))
    write_atomic(fs, path, (json.dumps(asdict(place)) + "\n").encode())
