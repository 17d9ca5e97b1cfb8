"""Backends of metrics: where a run's records go beside ``metrics.jsonl``, chosen in
``observe.backends``.

tracker = Tracker(config.observe.backends, note)
tracker.begin(run, again_from=None)
tracker.write(record)                          # returns at once, whatever a backend does
tracker.end(Status.COMPLETE)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from siirl_storage import absolute, join, open_fs, write_atomic

from siirl_dask.config import MetricsBackend
from siirl_dask.errors import ConfigError
from siirl_dask.observe.backends.aim_run import AimBackend
from siirl_dask.observe.backends.mlflow_run import MlflowBackend
from siirl_dask.observe.backends.outlet import Outlet, patience
from siirl_dask.observe.backends.parquet_file import ParquetBackend
from siirl_dask.observe.backends.protocol import TrackedRun, TrackerBackend
from siirl_dask.observe.backends.swanlab_run import SwanlabBackend
from siirl_dask.observe.backends.tensorboard_files import TensorBoardBackend
from siirl_dask.observe.backends.trackio_run import TrackioBackend
from siirl_dask.observe.backends.wandb_run import WandbBackend
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status
from siirl_dask.wording import redacted

__all__ = [
    "TrackedRun",
    "Tracker",
    "TrackerBackend",
    "check_backends",
    "missing_backends",
    "tracked_id",
]

_FILE = "tracking.json"
_MAKERS: dict[MetricsBackend, Callable[[], TrackerBackend]] = {
    MetricsBackend.parquet: ParquetBackend,
    MetricsBackend.tensorboard: TensorBoardBackend,
    MetricsBackend.wandb: WandbBackend,
    MetricsBackend.mlflow: MlflowBackend,
    MetricsBackend.swanlab: SwanlabBackend,
    MetricsBackend.trackio: TrackioBackend,
    MetricsBackend.aim: AimBackend,
}
"""Each imports its package when it begins, and not before."""


class Tracker:
    """Gives a run's records to each of its backends. Nothing that one does reaches the run."""

    def __init__(self, names: Sequence[MetricsBackend], note: Callable[[str], None]) -> None:
        """``note`` prints a sentence; any thread may call it."""
        self._names = names
        self._note = note
        self._outlets: list[Outlet] = []

    def begin(self, run: TrackedRun, again_from: int | None) -> None:
        """Open the run, once; records of the steps from ``again_from`` on come again, if that is
        not None.
        """
        if not self._outlets:
            self._outlets = [Outlet(name, _MAKERS[name], self._note) for name in self._names]
            for outlet in self._outlets:
                outlet.begin(run)
        if again_from is not None:
            for outlet in self._outlets:
                outlet.rewind(again_from)

    def write(self, record: Record) -> None:
        """Give every backend a record."""
        for outlet in self._outlets:
            outlet.write(record)

    def end(self, status: Status) -> None:
        """Tell every backend how the run ended, and wait for some seconds until they have sent
        what is left.
        """
        for outlet in self._outlets:
            outlet.end(status)
        deadline = patience()
        for outlet in self._outlets:
            outlet.wait(deadline)


def check_backends(names: Sequence[MetricsBackend]) -> None:
    """Raise ConfigError, with the cure, for a backend whose package is not installed."""
    for message in missing_backends(names):
        raise ConfigError(message)


def missing_backends(names: Sequence[MetricsBackend]) -> list[str]:
    """Return a sentence, with the cure, on each backend whose package is not installed."""
    return [
        f"observe.backends names {name}, and its package is not installed here: pip install "
        f"'siirl_dask[{name}]', or leave it out of observe.backends"
        for name in names
        if name is not MetricsBackend.parquet and not _is_installed(name)
    ]


def _is_installed(package: str) -> bool:
    """Tell whether a package can be imported; a mere folder of its name, such as wandb's
    ``./wandb``, is none.
    """
    spec = find_spec(package)
    if spec is None:
        return False
    return spec.origin is not None


def tracked_id(url: str, *, new: bool) -> str:
    """Return the id of the run at ``url`` for backends, from its ``tracking.json``; ``new``
    makes another one. So does the first start of a copy of a run that is still where it was: both
    would write into one run of the backends.
    """
    here = redacted(absolute(url))
    known = None
    if not new:
        known = _read_tracked(url)
    if known is not None and known.url == here:
        return known.id
    if known is None or _is_still_at(known, url):
        known = _TrackedPlace(uuid4().hex[:21])  # SwanLab's length; the others take any
    fs, path = open_fs(join(url, _FILE))
    write_atomic(fs, path, (json.dumps({"id": known.id, "url": here}) + "\n").encode())
    return known.id


@dataclass(frozen=True, slots=True)
class _TrackedPlace:
    """The content of ``tracking.json``."""

    id: str
    url: str = ""
    """Where the run was at its last start; empty in a file of an earlier version."""


def _read_tracked(url: str) -> _TrackedPlace | None:
    """Return what the run at ``url`` has recorded; None where that is nothing usable."""
    fs, path = open_fs(join(url, _FILE))
    try:
        found = json.loads(fs.cat_file(path))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    match found:
        case {"id": str(name)} if re.fullmatch("[0-9a-f]{21}", name):
            place = found.get("url", "")
            return _TrackedPlace(name, place if isinstance(place, str) else "")
    return None


def _is_still_at(known: _TrackedPlace, url: str) -> bool:
    """Return whether the run whose record is at ``url`` is also where it was, and not by another name
    of the same folder.
    """
    if not known.url:
        return False
    try:
        there = _read_tracked(known.url)
    except Exception:  # each store has errors of its own: it is read from here no more
        return False
    if there is None or there.id != known.id:
        return False
    there_file = Path(absolute(known.url), _FILE)
    here_file = Path(absolute(url), _FILE)
    if there_file.exists() and here_file.exists():  # and not in a store
        return not there_file.samefile(here_file)
    return True
