"""Values as JSON: what goes between a test and the program that it calls, neither of which runs the
other's code.

A value arrives as what it equals: numbers, texts, containers of Python. Everything else stays where
it is, and is referred to by a number.
"""

from __future__ import annotations

import builtins
import datetime
from collections import deque
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

_LONGEST_INT = 2**64  # a longer one is sent as hexadecimal digits, of which Python reads any number
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_TEXTS: dict[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.hex, bytes.fromhex),
    "bytearray": (bytearray, bytearray.hex, bytearray.fromhex),
    "decimal": (Decimal, str, Decimal),
    "fraction": (Fraction, str, Fraction),
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
}


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return ``value`` as JSON has it; ``refer`` gives what stands for a value that is none of
    Python's plain ones.
    """
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        if abs(value) < _LONGEST_INT:
            return int(value)
        return {"int": hex(value)}
    if isinstance(value, list):
        return [encode(item, refer) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, refer) for item in value]}
    for name, (kind, write, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {name: write(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if isinstance(value, datetime.timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, type) and issubclass(value, BaseException):
        return {"error": value.__name__}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), refer)
    return refer(value)


def decode(data: Any, find: Callable[[str, Any], Any]) -> Any:
    """Return the value that ``data`` stands for; ``find`` gives what is referred to. ValueError
    for anything else.
    """
    if isinstance(data, list):
        return [decode(item, find) for item in data]
    if not isinstance(data, dict):
        return data
    if len(data) != 1:
        raise ValueError(f"got {len(data)} kinds of a value: expected one")
    ((name, held),) = data.items()
    if name == "dict":
        return {decode(key, find): decode(item, find) for key, item in held}
    if name in _SEQUENCES:
        return _SEQUENCES[name](decode(item, find) for item in held)
    if name in _TEXTS:
        return _TEXTS[name][2](held)
    if name == "int":
        return int(held, 16)
    if name == "complex":
        real, imaginary = held
        return complex(real, imaginary)
    if name == "range":
        start, stop, step = held
        return range(start, stop, step)
    if name == "timedelta":
        days, seconds, microseconds = held
        return datetime.timedelta(days, seconds, microseconds)
    return find(name, held)


def builtin_name(value: Any) -> str | None:
    """Return the name of a function or a class of Python's own, such as ``len`` or ``int``; None
    for others.
    """
    name = getattr(value, "__name__", None)
    if isinstance(name, str) and getattr(builtins, name, None) is value:
        return name
    return None
