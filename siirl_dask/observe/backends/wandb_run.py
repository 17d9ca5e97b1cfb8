"""Sends records to Weights & Biases (https://wandb.ai). WANDB_MODE=offline keeps them on this
machine.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from siirl_dask.observe.backends.protocol import TrackedRun, named_values
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status

# 255 is what it calls killed
_EXIT_CODES = {Status.COMPLETE: 0, Status.FAILED: 1, Status.INTERRUPTED: 255}


class WandbBackend:
    """One run of wandb. Its x-axis is the metric ``step``: wandb's own steps cannot go back."""

    def begin(self, run: TrackedRun) -> None:
        """Open the run of this id, or go on with it."""
        wandb: Any = importlib.import_module("wandb")
        online = wandb.setup().settings.mode in ("online", "shared", "run")
        # it would ask for one, on a terminal that is the run's
        if online and not wandb.login(prompt=False):
            raise PermissionError(
                "it has no API key: type `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
            )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", run.project),
            id=run.id,
            name=run.name,
            config=run.config,
            resume="allow",
            settings=wandb.Settings(
                console="off"
            ),  # its capture of the terminal would take the progress bar's
            allow_val_change=True,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def rewind(self, step: int) -> None:
        """Leave what is there: wandb takes nothing back, and shows both points of a step."""

    def write(self, record: Record) -> None:
        """Log the values of a record."""
        self._run.log({"step": record["step"], **named_values(record)})

    def end(self, status: Status) -> None:
        """Note the status in the summary, and send what is left."""
        self._run.summary["status"] = str(status)
        self._run.finish(exit_code=_EXIT_CODES[status])
