"""Widths of tables, as a terminal that may be narrow shows them: rich cuts numbers that do not fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len

GAP = 3
"""Characters between two columns of a table whose box is SIMPLE_HEAD."""
_EDGES = 2


def table_width(columns: Sequence[Sequence[str]]) -> int:
    """Return the characters that columns of these texts, headings among them, take in a line."""
    widest = [max(map(cell_len, texts)) for texts in columns]
    return sum(widest) + GAP * (len(widest) - 1) + _EDGES
