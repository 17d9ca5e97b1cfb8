"""Finds the runs in the folder of a run, and reads their metrics for those who compare: a
bounded part of each.
"""

from __future__ import annotations

from siirl_storage import StorageError, join, open_fs
from siirl_storage.files import parent

from siirl_dask.errors import DataError
from siirl_dask.observe import METRICS_FILE, Record, parse_attempts
from siirl_dask.views.dashboard.records import thinned

_MOST_RUNS = 200
_MOST_BYTES = 2**24


def runs_beside(url: str) -> list[str]:
    """Return the names of the folders beside the run at ``url`` that have metrics, in alphabetical
    order.

    DataError for a folder that cannot be listed. Of more than 200 folders the first ones in the
    alphabet count.
    """
    try:
        fs, own = open_fs(url)
        above = parent(own)
        folders = sorted(
            str(entry["name"]).rstrip("/")
            for entry in fs.ls(above, detail=True)
            if entry.get("type") == "directory"
        )
        own = own.rstrip("/")
        others = [folder for folder in folders if folder != own][:_MOST_RUNS]
        return [
            folder.rpartition("/")[2] for folder in others if fs.exists(f"{folder}/{METRICS_FILE}")
        ]
    except StorageError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # each store has errors of its own: no credentials, no connection
        raise DataError(
            f"the runs beside {url!r} cannot be listed: {type(error).__name__}: {error}"
        ) from error


def metrics_tail(url: str, most: int, most_bytes: int = _MOST_BYTES) -> list[Record]:
    """Return at most ``most`` records of the run at ``url``, from the last 16 MiB of its metrics,
    or from as many bytes as ``most_bytes`` says; none without a file.

    DataError for a store that cannot be read, and for lines that are no records.
    """
    name = join(url, METRICS_FILE)
    try:
        fs, path = open_fs(name)
        size = int(fs.info(path)["size"] or 0)
        text = b""
        if size:
            text = fs.cat_file(path, start=max(0, size - most_bytes), end=size)
    except FileNotFoundError:
        return []
    except StorageError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # each store has errors of its own
        raise DataError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
    if size > most_bytes:
        text = text[text.find(b"\n") + 1 :]
    return thinned([record for record, _ in parse_attempts(text, name)], most)
