"""The end of every command: exit codes and error messages."""

from __future__ import annotations

import atexit
import errno
import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO, TypeVar

from siirl_dask.commands.program.interrupts import INTERRUPTED, STOPPED
from siirl_dask.errors import Interrupted, SiirlError, UserError
from siirl_dask.models.broken_imports import hide

EXIT_CODES = (
    "exit codes: 0 done, 1 the run failed, 2 an argument, config, DAG or dataset is unusable, 130 "
    "stopped by Ctrl-C or SIGTERM, 141 the reader of the output closed it"
)
_REMEDIES = {
    errno.EACCES: "use a place that is yours, or ask its owner for the right",
    errno.EPERM: "use a place that is yours, or ask its owner for the right",
    errno.EROFS: "choose another place",
    errno.ENOSPC: "free some space there, or choose another place",
    errno.EDQUOT: "free some space there, or choose another place",
    errno.ENOTDIR: "expected a folder where a file is",
    errno.EISDIR: "expected a file where a folder is",
}
"""Advice for errors of files that a user can mend."""
_T = TypeVar("_T")


def exit_with_message(work: Callable[[], _T]) -> _T:
    """Return the result of ``work``. A SiirlError becomes one message on stderr, any other error
    stays a traceback.
    """
    signal.signal(signal.SIGTERM, _as_interrupt)
    atexit.register(_end_soon)
    hide()
    _take_any_text(sys.stdout)
    try:
        return _with_output_flushed(work)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        _end_for_closed_pipe()
    except SiirlError as error:
        from siirl_dask.observe import announce  # rich: a tenth of a second, for errors alone

        announce(error)
        if isinstance(error, Interrupted):
            sys.exit(INTERRUPTED)
        sys.exit(2 if isinstance(error, UserError) else 1)


def find_functions_here() -> None:
    """Have functions that a config names as module:function looked for in the working directory,
    too.
    """
    sys.path.insert(0, str(Path.cwd()))


@contextmanager
def files_named() -> Iterator[None]:
    """Turn errors of the operating system into a SiirlError of one sentence, with the file and
    what to do, and so those of a store, which each driver has of its own.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename is None and error.errno not in _REMEDIES:
            _raise_if_of_store(error)
            raise  # of a connection, a process or a thread: no file that a user can mend
        _forget_unwritable_output()
        raise SiirlError(_sentence(error)) from error
    except SiirlError:
        raise
    except Exception as error:
        _raise_if_of_store(error)
        raise


def _raise_if_of_store(error: Exception) -> None:
    # pyarrow and fsspec, which the help of a command need not wait for
    from siirl_storage import is_of_store

    if is_of_store(error):
        tries = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        raise SiirlError(
            f"a store cannot be read or written: {type(error).__name__}: {error}{tries}; it is that "
            "of a URL of the command, or of its configuration: the name, the credentials or the "
            "connection do not do"
        ) from error


def _sentence(error: OSError) -> str:
    names = [name for name in (error.filename, error.filename2) if name is not None]
    where = " and ".join(
        os.fspath(name) if isinstance(name, str) else f"{name!r}" for name in names
    )
    reason = error.strerror
    if not reason:
        reason = str(error) if str(error) else type(error).__name__
    remedy = ""
    if error.errno is not None:
        remedy = _REMEDIES.get(error.errno, "")
    return f"{where or 'reading or writing'}: {reason}{'; ' if remedy else ''}{remedy}"


def _forget_unwritable_output() -> None:
    """Drop what standard output has not taken, if it takes nothing: Python would try again at its
    end, and print that as an error of its own.
    """
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()


def _discard_output() -> None:
    with suppress(OSError, io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _take_any_text(stream: TextIO) -> None:
    """Have a stream that knows few characters, such as ASCII's, show others by their number
    instead of ending us.
    """
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _with_output_flushed(work: Callable[[], _T]) -> _T:
    """Return the result of ``work`` once all that it printed is written, also where argparse prints
    help and exits.

    BrokenPipeError when the reader has closed the pipe; Python itself would only print that at its
    end.
    """
    try:
        result = work()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()
    return result


def _end_for_closed_pipe() -> NoReturn:
    """End quietly with the status of a program that SIGPIPE ends: the reader, such as ``head``,
    has enough.
    """
    # Python flushes stdout once more at its end, and would print the error
    _discard_output()
    sys.exit(128 + signal.SIGPIPE)


def _end_soon() -> None:
    """Keep Python from collecting all of torch's objects at exit, which takes a second.

    Not with triton or duckdb loaded: nanobind, which they are built with, would report leaks.
    """
    if not {"triton", "duckdb"} & sys.modules.keys():
        gc.freeze()


def _as_interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
