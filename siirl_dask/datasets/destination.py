"""The place of a table that is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from siirl_storage import Conflict, StorageError

from siirl_dask.errors import DataError


@contextmanager
def destination(url: str) -> Iterator[None]:
    """Turn errors of the storage at ``url`` into a DataError."""
    try:
        yield
    except Conflict as error:
        raise DataError(
            f"{url!r}: another process made a table there meanwhile: {error}"
        ) from error
    except (StorageError, OSError) as error:
        raise DataError(f"{url!r}: {error}") from error
