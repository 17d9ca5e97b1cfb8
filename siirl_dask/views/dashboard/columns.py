"""Gives a source of the page its columns: those that have changed alone, since each value costs
the scheduler time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource
from numpy.typing import NDArray

Columns = Mapping[str, Sequence[Any] | NDArray[np.float64]]
"""Columns of a source by name, all of one length."""


def numbers(values: Iterable[float]) -> NDArray[np.float64]:
    """Return a column of numbers as Bokeh sends it fastest: as its bytes, not one by one."""
    return np.fromiter(values, np.float64)


def show_columns(source: ColumnDataSource, data: Columns) -> None:
    """Give ``source`` these columns, and viewers those of them that are new."""
    held = source.data
    sizes = {name: len(column) for name, column in held.items()}
    if sizes != {name: len(column) for name, column in data.items()}:
        source.data = dict(data)
    elif changed := {
        name: column for name, column in data.items() if not _same(held[name], column)
    }:
        held.update(changed)


def _same(old: Any, new: Any) -> bool:
    if not isinstance(old, np.ndarray) and not isinstance(new, np.ndarray):
        return bool(old == new)
    if type(old) is not type(new):
        return False
    return bool(np.array_equal(old, new))
