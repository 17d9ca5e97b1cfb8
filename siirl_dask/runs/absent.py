"""Hints to a run's folder that is not there."""

from __future__ import annotations

from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import StorageError, open_fs
from siirl_storage.files import check_reached

from siirl_dask.errors import did_you_mean


def hint_if_absent(url: str) -> str:
    """Return that there is no folder at a local path, with the nearest name that there is, or that
    the web server of a URL does not answer; an empty string where neither is so.
    """
    try:
        fs, path = open_fs(url)
        if not isinstance(fs, LocalFileSystem):
            return _hint_if_unreached(fs, path)
        if Path(path).exists():
            return ""
        if Path(path).is_symlink():
            return f"; it is a link to {str(Path(path).readlink())!r}, which is not there"
        typed = Path(url).parent
        beside = [str(typed / other.name) for other in Path(path).parent.glob("*")]
    except (StorageError, OSError):
        return ""
    return f"; there is no such folder{did_you_mean(url, beside)}"


def _hint_if_unreached(fs: AbstractFileSystem, path: str) -> str:
    try:
        check_reached(fs, path)
    except StorageError as error:
        return f"; {error}"
    return ""
