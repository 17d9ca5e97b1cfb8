"""Hints to a run's folder that is not there."""

from __future__ import annotations

from pathlib import Path

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, open_fs

from siirl_dask.errors import did_you_mean


def hint_if_absent(url: str) -> str:
    """Return that there is no folder at a local path, with the nearest name that there is; an empty
    string where there is one, and for URLs.
    """
    try:
        fs, path = open_fs(url)
        if not isinstance(fs, LocalFileSystem) or Path(path).exists():
            return ""
        typed = Path(url).parent
        beside = [str(typed / other.name) for other in Path(path).parent.glob("*")]
    except (StorageError, OSError):
        return ""
    return f"; there is no such folder{did_you_mean(url, beside)}"
