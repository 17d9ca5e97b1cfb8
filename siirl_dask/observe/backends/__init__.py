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
from importlib.util import find_spec
from uuid import uuid4

from siirl_storage import join, open_fs, write_atomic

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
    makes another one.
    """
    fs, path = open_fs(join(url, _FILE))
    try:
        known = "" if new else json.loads(fs.cat_file(path))["id"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        known = ""
    if isinstance(known, str) and re.fullmatch("[0-9a-f]{21}", known):
        return known
    made = uuid4().hex[:21]  # SwanLab's length; the others take any
    write_atomic(fs, path, (json.dumps({"id": made}) + "\n").encode())
    return made
