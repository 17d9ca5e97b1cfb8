"""Sends records to Trackio (https://github.com/gradio-app/trackio): a database on this machine,
or a Space.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from siirl_dask.observe.backends.protocol import TrackedRun, named_values
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status


class TrackioBackend:
    """One run of Trackio, which goes by its name: that has a part of the id in it."""

    def __init__(self) -> None:
        self._step = 0

    def begin(self, run: TrackedRun) -> None:
        """Open the run, or go on with it."""
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", run.project),
            name=f"{run.name}-{run.id[:6]}",
            config=dict(run.config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # of this machine, where perhaps no worker is
            auto_log_gpu=False,
        )

    def rewind(self, step: int) -> None:
        """Leave what is there: Trackio takes nothing back, and shows both points of a step."""

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        self._step = record["step"]
        self._run.log(named_values(record), step=self._step)

    def end(self, status: Status) -> None:
        """Note the status, and send what is left."""
        self._run.log({"status": str(status)}, step=self._step)
        self._run.finish()
