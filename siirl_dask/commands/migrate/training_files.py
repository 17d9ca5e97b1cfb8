"""The files of rows that a configuration names, opened where they are here."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.commands.migrate.draft import Draft
from siirl_dask.errors import ConfigError


def open_here(url: str) -> pq.ParquetFile | None:
    """Return a Parquet file of this machine; None where ``url`` names none. ConfigError for one
    that cannot be read.
    """
    path = Path(url).expanduser()
    if path.suffix != ".parquet" or not path.is_file():
        return None
    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"training file {str(path)!r} cannot be read: {error}") from error


def files_of(draft: Draft, name: str) -> list[str]:
    """Return the files that an option names."""
    return [str(file) for file in draft.items(name)]


def training_files(draft: Draft) -> list[str]:
    """Return the files to train on: those that are given, else verl's default."""
    files = files_of(draft, "data.train_files")
    if files:
        return files
    return ["~/data/rlhf/gsm8k/train.parquet"]
