"""Adds the place to errors of users' functions, which cross to the driver's process without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exc

from siirl_dask.errors import SiirlError


@contextmanager
def named_errors(where: str, failure: type[SiirlError]) -> Iterator[None]:
    """Add ``where`` to a SiirlError raised inside, as a note; any other exception becomes a ``failure``."""
    try:
        yield
    except SiirlError as error:
        error.add_note(f"in {where}")
        raise
    except Exception as error:
        named = failure(f"{where}: {type(error).__name__}: {error}")
        named.add_note(format_exc())  # a traceback does not cross processes
        raise named from error
