"""Sends records to Aim (https://aimstack.io): the repository in the working directory, or that
of AIM_REPO.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from siirl_dask.observe.backends.protocol import TrackedRun
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status


class AimBackend:
    """One run of Aim, which is found again by its description: Aim makes hashes of its own."""

    def begin(self, run: TrackedRun) -> None:
        """Open the run with this id, or make one."""
        aim: Any = importlib.import_module("aim")
        place = os.environ.get("AIM_REPO", ".")
        repo = aim.Repo.from_path(place, init="://" not in place)
        # queries and attributes of runs that are open for reading come from an index, which only a
        # server keeps
        mark = f"siirl_dask {run.id}"
        runs = (aim.Run(one, repo=repo, read_only=True) for one in repo.list_all_runs())
        earlier = next((one.hash for one in runs if one.description == mark), None)
        # its capture of the terminal would take the progress bar's
        options = {"repo": repo, "system_tracking_interval": None, "capture_terminal_logs": False}
        self._run = aim.Run(run_hash=earlier, experiment=run.project, **options)
        self._run.name = run.name
        self._run.description = mark
        self._run["config"] = dict(run.config)
        self._run["status"] = "running"

    def rewind(self, step: int) -> None:
        """Leave what is there: a new value of a step takes the place of the earlier one."""

    def write(self, record: Record) -> None:
        """Track the values of a record, with its phase as their context."""
        for name, value in record["metrics"].items():
            if value is not None:
                self._run.track(
                    value,
                    name=name,
                    step=record["step"],
                    context={"phase": str(record["phase"])},
                )

    def end(self, status: Status) -> None:
        """Note the status, and close the run."""
        self._run["status"] = str(status)
        self._run.close()
