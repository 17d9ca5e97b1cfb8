"""Paths to the values of a table: a column, or a field of a column's structs."""

from __future__ import annotations

from collections.abc import Collection


def path_steps(path: str, columns: Collection[str]) -> list[str]:
    """Return the names that lead to the values at ``path`` in a table with these columns.

    A column of that name is the path's end, whatever dots its name has, as pandas' json_normalize
    and flattened datasets name theirs. Otherwise each dot leads into a struct.
    """
    if path in columns:
        return [path]
    return path.split(".")
