"""The columns of a published table, split up such that rows of them can be copied: variable-length
columns by their offsets, and the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from siirl_dask.coordinator.databuffer.ragged import (
    CopyPlan,
    RaggedColumn,
    as_ragged,
    as_shared_ragged,
    element_width,
)
from siirl_dask.schema import IDENTITY, with_large_offsets
from siirl_dask.tables import Ints


@dataclass(frozen=True, slots=True)
class TableColumns:
    """A table's columns: the variable-length ones by offset group, and the other ones. They never
    change, and any thread may read them.
    """

    ragged: dict[str, RaggedColumn]
    group_of: dict[str, int]
    """Offset group of each variable-length column."""
    lengths: list[Ints]
    """Elements of each row, [rows] an offset group."""
    starts: list[Ints]
    """Elements before each row, [rows] an offset group. Columns of a group have both in common."""
    others: list[str]
    """Columns that are not variable-length, or have nulls, and are not known from the statistics
    already."""
    other_row_bytes: int
    """Bytes of a row in the other columns, about."""

    @staticmethod
    def of(table: pa.Table) -> TableColumns:
        columns = {
            name: _in_one_piece(table[name]) for name in table.column_names if name not in IDENTITY
        }
        ragged = {name: column for name, column in columns.items() if column is not None}
        group_of: dict[str, int] = {}
        lengths: list[Ints] = []
        starts: list[Ints] = []
        # columns with the same lengths and starts are one group: these bytes are the key
        group_of_key: dict[tuple[bytes, bytes], int] = {}
        for name, column in ragged.items():
            key = (column.lengths.tobytes(), column.starts.tobytes())
            if key not in group_of_key:
                group_of_key[key] = len(group_of_key)
                lengths.append(column.lengths)
                starts.append(column.starts)
            group_of[name] = group_of_key[key]
        others = [name for name in columns if name not in ragged]
        other_bytes = sum(table[name].nbytes for name in others)
        other_row_bytes = -(-other_bytes // max(1, table.num_rows))  # rounded up
        return TableColumns(
            ragged=ragged,
            group_of=group_of,
            lengths=lengths,
            starts=starts,
            others=others,
            other_row_bytes=other_row_bytes,
        )

    def group_lengths(self, positions: Ints) -> list[Ints]:
        """Return elements of the rows at ``positions``, [rows] an offset group."""
        return [lengths[positions] for lengths in self.lengths]

    def ragged_bytes(self, positions: Ints, columns: Sequence[str]) -> int:
        """Return bytes of some variable-length columns of the rows at ``positions``."""
        elements = [int(lengths[positions].sum()) for lengths in self.lengths]
        total = 0
        for name in columns:
            total += elements[self.group_of[name]] * self.ragged[name].width
        return total

    def copy_plan(self, group: int, positions: Ints, targets: Ints) -> CopyPlan:
        """Plan to copy the rows at ``positions`` from columns of an offset group to ``targets``,
        in elements.
        """
        return CopyPlan(self.starts[group][positions], targets, self.lengths[group][positions])


def _in_one_piece(column: pa.ChunkedArray) -> RaggedColumn | None:
    if element_width(column.type) is None:
        return None
    if column.num_chunks == 1:
        return as_ragged(column.chunk(0))
    if column.num_chunks > 1:
        shared = as_shared_ragged(column.chunks)
        if shared is not None:
            return shared
    # together the chunks may have more elements than offsets of 32 bits span
    large = with_large_offsets(column.type)
    return as_ragged(pa.concat_arrays([pa.array([], large), *column.cast(large).chunks]))
