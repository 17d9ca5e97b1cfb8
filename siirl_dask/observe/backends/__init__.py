"""Backends of metrics: where a run's records go beside ``metrics.jsonl``, chosen in
``observe.backends``.

tracker = Tracker(config.observe.backends, note)
tracker.begin(run, again_from=None)
tracker.write(record)                          # returns at once, whatever a backend does
tracker.end(Status.COMPLETE)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec

from siirl_dask.config import MetricsBackend
from siirl_dask.errors import ConfigError
from siirl_dask.observe.backends.aim_run import AimBackend
from siirl_dask.observe.backends.identity import TrackedIdentity, identify
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
    "TrackedIdentity",
    "TrackedRun",
    "Tracker",
    "TrackerBackend",
    "check_backends",
    "identify",
    "missing_backends",
]

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
_IN_FOLDER = (MetricsBackend.parquet, MetricsBackend.tensorboard)
"""Backends whose files are in the run's folder, and come along where that is copied."""


class Tracker:
    """Gives a run's records to each of its backends. Nothing that one does reaches the run."""

    def __init__(self, names: Sequence[MetricsBackend], note: Callable[[str], None]) -> None:
        """``note`` prints a sentence; any thread may call it."""
        self._names = names
        self._note = note
        self._outlets: list[Outlet] = []

    def begin(
        self, run: TrackedRun, again_from: int | None, earlier: Sequence[Record] = ()
    ) -> None:
        """Open the run, once; records of the steps from ``again_from`` on come again, if that is
        not None. ``earlier`` are records of which a backend outside of the run's folder has none,
        since the run has another id there than before.
        """
        if not self._outlets:
            for name in self._names:
                outlet = Outlet(name, _MAKERS[name], self._note)
                outlet.begin(run)
                if name not in _IN_FOLDER:
                    outlet.write_all(earlier)
                self._outlets.append(outlet)
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
