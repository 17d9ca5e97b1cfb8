"""What a consumer knows of a source's rows before their bytes come: how long each is, in each column.

Columns share patterns of lengths (prompts; responses and all that is said of each of their tokens), so a description is
small. It travels with the statistics of an edge where there are few rows, and is asked for otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.cells import cell_width
from siirl_dask.coordinator.frames import Frame
from siirl_dask.coordinator.lending import Loan, unpack_loan
from siirl_dask.coordinator.messages import pack_ints, unpack_ints
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY

LONGEST = 2**48  # elements of a row; what is more is no length


@dataclass(frozen=True, slots=True)
class Description:
    """Of the rows of one source: those it published, or some of them."""

    source: int
    """Index into the edge's sources."""
    domain: str
    """See ``shared_memory_domain``."""
    row_bytes: int
    """Of the other columns, about, per row."""
    columns: Mapping[str, int]
    """Pattern of each column whose rows are runs of bytes."""
    patterns: Sequence[Ints] | None
    """Elements of each row; None where they are still to be asked for."""
    loan: Loan | None = None
    """Where the rows can be read by processes of the source's domain."""

    @property
    def rows(self) -> int:
        """That the source published. Not where the patterns are still to be asked for."""
        assert self.patterns
        return len(self.patterns[0])

    def lengths(self, rows: Ints) -> dict[str, Ints]:
        """By column, of some of the rows. PeerError when the source published fewer."""
        assert self.patterns is not None
        if any(len(pattern) <= rows.max(initial=-1) for pattern in self.patterns):
            raise PeerError("a source described fewer rows than it has")
        taken = [pattern[rows] for pattern in self.patterns]
        return {name: taken[pattern] for name, pattern in self.columns.items()}

    def pack(self) -> tuple[list[Any], list[Frame]]:
        count = -1 if self.patterns is None else len(self.patterns)
        loan = self.loan and self.loan.pack()
        header = [self.source, self.domain, self.row_bytes, dict(self.columns), count, loan]
        return header, [pack_ints(pattern) for pattern in self.patterns or ()]


def plain_schema(schema: pa.Schema, runs: Collection[str]) -> pa.Schema:
    """Of the columns that are neither ``runs`` of bytes nor told by the statistics."""
    return pa.schema([field for field in schema if field.name not in runs and field.name not in IDENTITY])


def unpack_descriptions(
    headers: object, frames: Sequence[Frame], sources: int, schema: pa.Schema
) -> dict[int, Description]:
    """By source. PeerError for what are no descriptions of rows of ``schema``."""
    found: dict[int, Description] = {}
    left = list(frames)
    for header in headers if isinstance(headers, list | tuple) else [headers]:
        match header:
            case [int(source), str(domain), int(row_bytes), dict(columns), int(count), loan] if (
                0 <= source < sources
                and 0 <= row_bytes < LONGEST
                and -1 <= count <= len(left)
                and _fit(columns, count, schema)
            ):
                patterns = [unpack_ints(bytes(frame), LONGEST, 2**40) for frame in left[: max(count, 0)]]
                left = left[max(count, 0) :]
                known = None if count < 0 else patterns
                found[source] = Description(source, domain, row_bytes, columns, known, unpack_loan(loan))
            case _:
                raise PeerError(f"received {str(header)[:120]!r} for a description of rows of {schema.names}")
    if left:
        raise PeerError(f"received {len(left)} frames that belong to no description")
    return found


def _fit(columns: Mapping[Any, Any], count: int, schema: pa.Schema) -> bool:
    """Known columns of types that are runs of bytes, each with a pattern that is there."""
    names = set(schema.names)
    runs = (name in names and cell_width(schema.field(name).type) is not None for name in columns)
    numbers = columns.values()
    return all(runs) and all(isinstance(n, int) and n >= 0 and (count < 0 or n < count) for n in numbers)


def pack_descriptions(descriptions: Iterable[Description]) -> tuple[list[Any], list[Frame]]:
    packed = [description.pack() for description in descriptions]
    return [header for header, _ in packed], [frame for _, frames in packed for frame in frames]
