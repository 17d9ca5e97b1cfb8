"""Sends records to SwanLab (https://swanlab.cn). SWANLAB_MODE=local or offline keeps them on this machine."""

from __future__ import annotations

import importlib
import os
from typing import Any

from siirl_dask.observe.backends.protocol import TrackedRun, named_values
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status


class SwanlabBackend:
    """One experiment of SwanLab, which has one in a process."""

    def begin(self, run: TrackedRun) -> None:
        """Open the experiment of this id, or go on with it."""
        self._swanlab: Any = importlib.import_module("swanlab")
        self._swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", run.project),
            experiment_name=run.name,
            config=dict(run.config),
            id=run.id,
            resume="allow",
        )

    def rewind(self, step: int) -> None:
        """Leave what is there: SwanLab takes nothing back, and keeps the first value of a step."""

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        self._swanlab.log(named_values(record), step=record["step"])

    def end(self, status: Status) -> None:
        """Note the status, and send what is left."""
        failed = status is not Status.COMPLETE
        self._swanlab.finish(*(["crashed", str(status)] if failed else []))
