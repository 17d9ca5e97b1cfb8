"""Sends records to SwanLab (https://swanlab.cn). SWANLAB_MODE=local or offline keeps them on
this machine.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from siirl_dask.observe.backends.protocol import TrackedRun, named_values
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status

_STATES = {Status.COMPLETE: "success", Status.FAILED: "crashed", Status.INTERRUPTED: "aborted"}


class SwanlabBackend:
    """One experiment of SwanLab, which has one in a process."""

    def begin(self, run: TrackedRun) -> None:
        """Open the experiment of this id, or go on with it."""
        swanlab: Any = importlib.import_module("swanlab")
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME", run.project),
            name=run.name,
            config=dict(run.config),
            id=run.id,
            resume="allow",
            # it would ask for a key, and capture what is printed: the terminal is the run's
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )

    def rewind(self, step: int) -> None:
        """Leave what is there: SwanLab takes nothing back, and keeps the first value of a step."""

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        self._run.log(named_values(record), step=record["step"])

    def end(self, status: Status) -> None:
        """Note the status, and send what is left."""
        self._run.finish(_STATES[status])
