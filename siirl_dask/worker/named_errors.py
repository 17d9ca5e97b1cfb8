"""Prepares errors for the driver's process: they name where they happened, in a form that any
process can load.

Dask pickles an exception with its tracebacks and all its causes. Where that fails, as it does for a
long chain of causes, the driver would get an ``Exception`` that has lost its type.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from traceback import format_exception

from siirl_dask import errors
from siirl_dask.errors import Origin, PeerError, RunError, SiirlError, is_of_collective

# characters of a message or a note: Dask cuts longer ones than 10,000, and changes their type
_MAX_LENGTH = 8000
_OWN = "siirl_dask.worker."  # modules that only call what failed
_CUT = "\n[... {} characters ...]\n"
_UNKNOWN = Origin()
# torch's and Arrow's, which this module does not import
_NO_MEMORY = ("OutOfMemoryError", "ArrowMemoryError")
_MEMORY = (
    "memory ran out: `siirl-dask plan CONFIG` shows what each role takes and proposes what to "
    "change, such as trainer.max_tokens_per_micro_batch"
)


@contextmanager
def named_errors(
    where: str, failure: type[SiirlError], origin: Origin = _UNKNOWN
) -> Iterator[None]:
    """Add ``where``, as a note, and ``origin`` to a SiirlError raised inside; other errors become a
    ``failure``.

    An error of a collective becomes a PeerError: a rank is gone, or stands still.
    """
    try:
        yield
    except SiirlError as error:
        error.add_note(f"in {where}")
        error.origin = replace(origin, rows=error.origin.rows)
        raise
    except Exception as error:
        if is_of_collective(error):
            raise PeerError(f"{where}: a collective failed: {error}") from error
        named = failure(f"{where}: {type(error).__name__}: {error}")
        named.origin = origin
        named.add_note(_traceback(error))
        if isinstance(error, MemoryError) or type(error).__name__ in _NO_MEMORY:
            named.add_note(_MEMORY)
        raise named from error


def portable(error: Exception, worker: str) -> SiirlError:
    """Return an exception that any process can load: of this package, without causes, its texts of
    bounded length.

    A note names the type, the worker and its host. An exception of any other package becomes a
    RunError.
    """
    where = f"{type(error).__name__} of worker {worker!r} on host {socket.gethostname()!r}"
    kind = next((base for base in type(error).__mro__ if base.__module__ == errors.__name__), None)
    if kind is None:
        failure: SiirlError = RunError(_cut(f"a worker failed: {type(error).__name__}: {error}"))
        failure.add_note(_traceback(error))
    else:
        failure = kind(_cut(str(error)))
    for note in getattr(error, "__notes__", ()):
        failure.add_note(_cut(str(note)))
    failure.add_note(where)
    origin = error.origin if isinstance(error, SiirlError) else _UNKNOWN
    failure.origin = replace(origin, worker=worker, host=socket.gethostname())
    return failure


def _traceback(error: Exception) -> str:
    """Return the error's traceback from where the worker has called the code that failed."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        if not str(traceback.tb_frame.f_globals.get("__name__")).startswith(_OWN):
            break
        traceback = traceback.tb_next
    return _cut("".join(format_exception(type(error), error, traceback)))


def _cut(text: str) -> str:
    """Return ``text``, without its middle where it is too long: it begins with what failed and
    ends with the cause.
    """
    if len(text) <= _MAX_LENGTH:
        return text
    half = _MAX_LENGTH // 2
    left_out = len(text) - 2 * half
    return text[:half] + _CUT.format(left_out) + text[-half:]
