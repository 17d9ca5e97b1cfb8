"""Words about a user's function: its name and place, what it returned, what it raised and where.

A user's objects may have a ``__str__`` or ``__repr__`` that raises or never ends a line; whatever
they give is short here, and can be written as UTF-8.
"""

from __future__ import annotations

import functools
import inspect
import re
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb

_LONGEST = 1000  # characters of an exception's text, or of a value
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")
_PACKAGE = f"{Path(__file__).parents[1]}/"
_UNKNOWN = "<dynamic-code>"  # cloudpickle's file of what Dask has sent to a worker
_INSTALLED = tuple(
    f"{path}/" for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))
)


def without_addresses(text: str) -> str:
    """Return a text without addresses in memory, which are others in each run."""
    return _ADDRESS.sub("0x...", text)


def bounded(text: str) -> str:
    """Return a text that is not longer than a paragraph and can be written as UTF-8, which other
    workers and logs want.
    """
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}..."
    return text.encode("utf-8", "replace").decode()


def value_text(value: object) -> str:
    """Return how an error words a value that a user's function gave."""
    return _text_of(value, repr)


def exception_text(error: BaseException) -> str:
    """Return how a failure words an exception: ``raised KeyError: 'x'``."""
    text = _text_of(error, str)
    if not text:
        return f"raised {type(error).__name__}"
    return f"raised {type(error).__name__}: {text}"


def exception_text_with_place(error: BaseException) -> str:
    """Return ``exception_text`` with the line of the user's own code that raised, or that called
    what raised: ``raised KeyError: 'x' (my_reward.py:12)``.
    """
    text = exception_text(error)
    place = _raised_at(error)
    if place is None:
        return text
    return f"{text} ({place})"


def function_label(function: object) -> str:
    """Return a function's name, or that of an object's class."""
    if isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None)
    if isinstance(name, str):
        return name
    return type(function).__qualname__


def function_with_place(function: object) -> str:
    """Return a function's name with the line that defines it, ``right (my_reward.py:3)``; the name
    alone where it is not written in Python.
    """
    if isinstance(function, functools.partial):
        function = function.func
    inner = function
    if callable(function):
        inner = inspect.unwrap(function)
    if inspect.isclass(inner):
        inner = inner.__init__
    code = getattr(inner, "__code__", None)
    if code is None:
        call = getattr(type(inner), "__call__", None)  # noqa: B004
        code = getattr(call, "__code__", None)
    if code is None:
        return function_label(function)
    return f"{function_label(function)} ({_spelled(code.co_filename, code.co_firstlineno)})"


def _text_of(value: object, words: Callable[[object], str]) -> str:
    try:
        text = words(value)
    except Exception as error:  # a user's __str__, or a whole number of 5,000 digits
        text = f"<{type(value).__name__}, of which no text can be made: {type(error).__name__}>"
    return bounded(without_addresses(text))


def _raised_at(error: BaseException) -> str | None:
    """Return the innermost line that is the user's own, or else the outermost one that is not this
    package's.
    """
    outside = []
    for frame, line in walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith((_PACKAGE, "<frozen ")):
            outside.append((frame.f_code, line))
    own = [place for place in outside if not place[0].co_filename.startswith(_INSTALLED)]
    if own:
        code, line = own[-1]
    elif outside:
        code, line = outside[0]
    else:
        return None
    if code.co_filename == _UNKNOWN:
        return f"line {line}, in {code.co_name}"
    return _spelled(code.co_filename, line)


def _spelled(file: str, line: int) -> str:
    """Return a place with its file as seen from the working directory, where that is shorter."""
    with suppress(ValueError, OSError):  # it is elsewhere, or the working directory is gone
        file = str(Path(file).relative_to(Path.cwd()))
    return f"{file}:{line}"
