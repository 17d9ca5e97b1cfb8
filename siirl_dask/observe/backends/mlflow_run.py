"""Sends records to MLflow (https://mlflow.org), where MLFLOW_TRACKING_URI says."""

from __future__ import annotations

import importlib
import re
import time
from typing import Any

from siirl_dask.observe.backends.protocol import TrackedRun, named_values
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status

_ID = "siirl_dask.run"
"""Tag by which the run is found again: MLflow makes ids of its own."""
_STATUS = {Status.COMPLETE: "FINISHED", Status.FAILED: "FAILED", Status.INTERRUPTED: "KILLED"}
_PARAMETERS = 100  # in a request, MLflow's limit
_LONGEST = 500  # characters of a parameter that every store of MLflow takes


class MlflowBackend:
    """One run of MLflow, by its client: no global state of the process changes."""

    def begin(self, run: TrackedRun) -> None:
        """Open the run with this id's tag, or make one."""
        mlflow: Any = importlib.import_module("mlflow")
        self._entities: Any = importlib.import_module("mlflow.entities")
        self._client = mlflow.MlflowClient()
        experiment = self._client.get_experiment_by_name(run.project)
        home = (
            experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        )
        found = self._client.search_runs([home], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        if not found:
            found = [self._client.create_run(home, run_name=run.name, tags={_ID: run.id})]
        tracked = found[0]
        self._id = tracked.info.run_id
        self._client.update_run(self._id, status="RUNNING")
        known = tracked.data.params  # one that is there cannot be changed
        new = [
            self._entities.Param(key, str(value)[:_LONGEST])
            for key, value in run.settings().items()
            if key not in known
        ]
        for first in range(0, len(new), _PARAMETERS):
            self._client.log_batch(self._id, params=new[first : first + _PARAMETERS])
        self._client.log_dict(self._id, dict(run.config), "config.yaml")

    def rewind(self, step: int) -> None:
        """Leave what is there: MLflow takes nothing back, and the newest value of a step counts."""

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        now = int(time.time() * 1000)
        values = {_allowed(name): value for name, value in named_values(record).items()}
        metrics = [
            self._entities.Metric(name, value, now, record["step"])
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, status: Status) -> None:
        """Note the status."""
        self._client.set_terminated(self._id, _STATUS[status])


def _allowed(name: str) -> str:
    """Return the name with what MLflow allows in one: ``pass@8`` is ``pass_at_8``."""
    return re.sub(r"[^\w./ -]", "_", name.replace("@", "_at_"))
