"""Writes records as TensorBoard scalars under ``<run.url>/tensorboard``: see ``tensorboard --logdir <run.url>``."""

from __future__ import annotations

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import join, open_fs

from siirl_dask.errors import ConfigError
from siirl_dask.observe.metrics import Record


class TensorBoardLog:
    """Writes each record as scalars: training metrics by their own name, others prefixed by their phase."""

    def __init__(self, url: str, again_from: int | None = None) -> None:
        """Open the log and hide its records from step ``again_from`` on. ConfigError without tensorboard."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # here, because it costs a second and is optional
        except ImportError as error:
            raise ConfigError(
                f"observe.tensorboard=true needs the package tensorboard ({error}): "
                "pip install 'siirl_dask[tensorboard]', or set observe.tensorboard=false"
            ) from error
        folder = join(url, "tensorboard")
        fs, path = open_fs(folder)
        self._writer = SummaryWriter(path if isinstance(fs, LocalFileSystem) else folder, purge_step=again_from)

    def write(self, record: Record) -> None:
        """Write the values of a record at its step."""
        prefix = "" if record["phase"] == "train" else f"{record['phase']}/"
        for name, value in record["metrics"].items():
            if value is not None:
                self._writer.add_scalar(prefix + name, value, record["step"])
        self._writer.flush()  # else the page is two minutes behind

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
