"""Writes records as TensorBoard scalars under ``<run.url>/tensorboard``: see ``tensorboard
--logdir <run.url>``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import join, open_fs

from siirl_dask.observe.backends.protocol import TrackedRun, named_values
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.summary import Status

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardBackend:
    """Writes each record as scalars, and the configuration as a text."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None

    def begin(self, run: TrackedRun) -> None:
        """Find the folder, and write the configuration."""
        folder = join(run.url, "tensorboard")
        fs, path = open_fs(folder)
        self._folder = path if isinstance(fs, LocalFileSystem) else folder
        text = json.dumps(run.config, indent=2, default=str).replace("\n", "\n    ")
        self._open().add_text("config", f"    {text}", 0)

    def rewind(self, step: int) -> None:
        """Hide the records of the steps from ``step`` on."""
        self._close()
        self._open(step)

    def write(self, record: Record) -> None:
        """Write the values of a record at its step."""
        writer = self._open()
        for name, value in named_values(record).items():
            writer.add_scalar(name, value, record["step"])
        writer.flush()  # else the page is two minutes behind

    def end(self, status: Status) -> None:
        """Write how the run ended, and close the event file."""
        self._open().add_text("status", str(status), 0)
        self._close()

    def _open(self, purge_step: int | None = None) -> SummaryWriter:
        # here, because it costs a second and is optional
        from torch.utils.tensorboard import SummaryWriter

        if self._writer is None:
            self._writer = SummaryWriter(self._folder, purge_step=purge_step)
        return self._writer

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None
