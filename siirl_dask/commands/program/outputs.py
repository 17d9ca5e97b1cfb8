"""Writes the file that an option of a command names."""

from __future__ import annotations

from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, open_fs, write_atomic

from siirl_dask.errors import ConfigError


def write_output(url: str, content: bytes, *, option: str, what: str) -> None:
    """Write ``content`` to a path or a URL. ConfigError, naming ``option`` and ``what`` it is, for
    a place that cannot be written, and for a folder that is not there: it would be a misspelt one.
    """
    try:
        fs, path = open_fs(url)
        if isinstance(fs, LocalFileSystem) and not Path(path).parent.is_dir():
            raise ConfigError(
                f"{option} {url!r}: the {what} cannot be written: there is no folder "
                f"{str(Path(path).parent)!r}"
            )
        write_atomic(fs, path, content)
    except (StorageError, OSError) as error:
        raise ConfigError(
            f"{option} {url!r}: the {what} cannot be written: {type(error).__name__}: {error}"
        ) from error
