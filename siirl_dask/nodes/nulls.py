"""Rows of which something is not known: they travel on, marked by null, and are left out of what is computed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Flags = NDArray[np.bool_]


def rows_with(table: pa.Table, *names: str) -> Flags:
    """[R]: rows in which none of the columns that are there is null."""
    there = [pc.is_valid(table[name]).to_numpy() for name in names if name in table.column_names]
    flags: Flags = np.logical_and.reduce(there)
    return flags


def only_where(there: Flags, given: pa.Array) -> pa.Array:
    """``given``, of the rows in which something is there, as a column of all rows, null in the others."""
    return given.take(pa.array(np.cumsum(there) - 1, pa.int64(), mask=~there))
