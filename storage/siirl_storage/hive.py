"""Columns from folder names: ``step=000007/part.parquet`` has a column ``step``, unless the file
itself has one.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

import pyarrow as pa

_NULL = "__HIVE_DEFAULT_PARTITION__"


def values(path: str) -> dict[str, str | None]:
    """Return the ``key=value`` folders of a part's relative path; None stands for a null."""
    found: dict[str, str | None] = {}
    *folders, _ = path.split("/")
    for folder in folders:
        key, equals, value = folder.partition("=")
        if key and equals:
            found[unquote(key)] = None if value == _NULL else unquote(value)
    return found


def fields(paths: Iterable[str]) -> dict[str, pa.Field]:
    """Return a field for each key in ``paths``: int64 if all of its values are integers,
    otherwise string.
    """
    folders: dict[str, list[str | None]] = {}
    for path in paths:
        for key, value in values(path).items():
            folders.setdefault(key, []).append(value)
    found = {}
    for key, column in folders.items():
        are_integers = all(value is None or _is_int64(value) for value in column)
        found[key] = pa.field(key, pa.int64() if are_integers else pa.string())
    return found


def scalar(value: str | None, kind: pa.DataType) -> pa.Scalar:
    """Return ``value`` in the column's type."""
    return pa.scalar(value, pa.string()).cast(kind)


def _is_int64(text: str) -> bool:
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) >= 40:
        return False
    return -(2**63) <= int(text) < 2**63
