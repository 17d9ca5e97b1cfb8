"""Exceptions of an engine as plain data: an engine in another process raises what it raises in the
worker's own.
"""

from __future__ import annotations

import traceback

from siirl_dask import errors
from siirl_dask.errors import PeerError, RunError, SiirlError, is_of_collective

_PLAIN: dict[str, type[Exception]] = {"ValueError": ValueError, "TypeError": TypeError}
"""Exceptions of Python's that the protocol of engines names."""


def describe_error(error: Exception) -> list[str]:
    """Return an exception's class and text; of one that is nobody's mistake, which is a bug, the
    traceback goes to standard error. What a collective raises becomes a PeerError: another rank is
    gone.
    """
    if is_of_collective(error):
        error = PeerError(f"a collective of the engine's ranks failed: {error}")
    name = type(error).__name__
    if name not in _PLAIN and not isinstance(error, SiirlError):
        traceback.print_exception(error)
    # messages hold no half characters, which names of files may have
    return [name, str(error).encode("utf-8", "replace").decode()]


def read_error(value: object) -> Exception:
    """Return the exception in ``value``: RunError for a class that engines do not promise."""
    match value:
        case [str(name), str(text)]:
            known = getattr(errors, name, None)
            if isinstance(known, type) and issubclass(known, SiirlError):
                return known(text)
            if name in _PLAIN:
                return _PLAIN[name](text)
            return RunError(f"the engine raised {name} in its process: {text}")
    return PeerError(f"received {value!r:.200}, which is no exception")
