"""Recognizes a JSON file that holds a whole table in one object, which would be read as one row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ROWS = ("data", "rows", "records", "instances", "examples")
"""Keys under which other programs write the rows, beside what they say about them."""
_SPEAKERS = ("role", "from")
"""Keys of chat messages that name who speaks."""
CURE = (
    "write an object for each row, as pandas' df.to_json(FILE, orient='records', lines=True) does"
)


def table_in_one_object(value: Mapping[str, Any]) -> str | None:
    """Return how an object, all that its file holds, has a whole table in it; None where it is
    a row.

    pandas' ``to_json`` writes such an object by columns (its default), index, split and table, and
    ``json.dump`` one of lists by columns or by splits.
    """
    parts = list(value.values())
    if not parts:
        return None
    if all(isinstance(part, dict) for part in parts):
        keys = {frozenset(part) for part in parts}
        if len(keys) == 1:
            return "an object of the same keys under each key, as pandas writes by default"
        return None
    if all(isinstance(part, list) for part in parts):
        if any(_is_chat(part) for part in parts):
            return None
        return "a list under each key"
    for name in _ROWS:
        if _holds_rows(value, name):
            return f"the rows under {name!r}"
    return None


def _holds_rows(value: Mapping[str, Any], name: str) -> bool:
    rows = value.get(name)
    if not isinstance(rows, list) or not rows:
        return False
    if isinstance(value.get("schema"), dict):
        return True
    if not all(isinstance(row, (dict, list)) for row in rows):
        return False
    return not _is_chat(rows)


def _is_chat(values: list[Any]) -> bool:
    """Return whether a list is one of chat messages."""
    for value in values:
        if not isinstance(value, dict) or not any(speaker in value for speaker in _SPEAKERS):
            return False
    return bool(values)
