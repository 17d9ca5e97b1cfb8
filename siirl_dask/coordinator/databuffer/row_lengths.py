"""Row lengths: all that a target must know of a source's rows to lay out its result before their
bytes arrive.

Columns share offset groups (prompts; responses and whatever is known of each of their tokens), so
this is small. It travels with an edge's statistics where there are few rows, and is requested
otherwise. Where a source shares its table, they say where the rows lie as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from siirl_dask.comms.wire import Frame
from siirl_dask.coordinator.databuffer.arena import Handle, unpack_handle
from siirl_dask.coordinator.databuffer.ragged import element_width
from siirl_dask.coordinator.transport.messages import TransitionKey, pack_ints, unpack_ints
from siirl_dask.errors import PeerError
from siirl_dask.schema import IDENTITY
from siirl_dask.tables import Ints

MAX_ROW_ELEMENTS = 2**48
"""A peer that announces a longer row is refused."""


@dataclass(frozen=True, slots=True)
class SharedTable:
    """The place of a source's rows in one of its segments, in bytes from the segment's start."""

    handle: Handle
    starts: Mapping[str, int]
    """First byte of each variable-length column; its rows follow one another."""
    others_start: int
    """First byte of the other columns (see ``shared_tables.pack_others``)."""
    others_size: int
    """Bytes of them, 0 where there are no other columns."""

    def pack(self) -> list[Any]:
        return [self.handle.pack(), dict(self.starts), self.others_start, self.others_size]


def unpack_shared_table(value: object) -> SharedTable | None:
    """Return what ``SharedTable.pack`` packed, or None for None. PeerError when ``value`` is
    neither.
    """
    match value:
        case None:
            return None
        case [list() | tuple() as handle, dict(starts), int(others_start), int(others_size)] if (
            _are_starts(starts) and min(others_start, others_size) >= 0
        ):
            return SharedTable(unpack_handle(list(handle)), starts, others_start, others_size)
    raise PeerError(f"received {str(value)[:120]!r} for a shared table")


def _are_starts(starts: Mapping[Any, Any]) -> bool:
    """Return whether a peer's mapping is one of names to first bytes."""
    for name, start in starts.items():
        if not isinstance(name, str) or not isinstance(start, int) or start < 0:
            return False
    return True


@dataclass(frozen=True, slots=True)
class RowLengths:
    """Lengths of the rows that one source published."""

    source: int
    """Index of the source among the edge's sources."""
    domain: str
    """The source's ``shared_memory_domain``."""
    other_row_bytes: int
    """Bytes of a row in the other columns, about."""
    offset_groups: Mapping[str, int]
    """Offset group of each variable-length column."""
    group_lengths: Sequence[Ints] | None
    """Elements of each row, [rows] a group; None where they are still to be asked for."""
    shared_table: SharedTable | None = None
    """The place where processes of the source's domain can read the rows; None where they are
    not shared."""

    @property
    def rows(self) -> int:
        """Rows that the source published. The lengths must be there, of one group at least."""
        assert self.group_lengths
        return len(self.group_lengths[0])

    def select(self, positions: Ints) -> dict[str, Ints]:
        """Return the lengths, by column, of the rows at ``positions``. PeerError when the source
        published fewer.

        Columns of one group get the same array object: ``receive_buffer`` recognizes groups by
        that.
        """
        assert self.group_lengths is not None
        if any(len(lengths) <= positions.max(initial=-1) for lengths in self.group_lengths):
            raise PeerError("a source told the lengths of fewer rows than it has")
        selected = [lengths[positions] for lengths in self.group_lengths]
        return {name: selected[group] for name, group in self.offset_groups.items()}

    def pack(self) -> tuple[list[Any], list[Frame]]:
        count = -1
        frames: list[Frame] = []
        if self.group_lengths is not None:
            count = len(self.group_lengths)
            frames = [pack_ints(lengths) for lengths in self.group_lengths]
        shared = None if self.shared_table is None else self.shared_table.pack()
        header = [
            self.source,
            self.domain,
            self.other_row_bytes,
            dict(self.offset_groups),
            count,
            shared,
        ]
        return header, frames


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Rows of a pull that one worker has: a source, or a target of this host that passes rows
    on.
    """

    worker: str
    key: TransitionKey
    """Key under which the worker published them."""
    positions: Ints
    """[rows] positions in what it published."""
    destinations: Ints
    """[rows] index of the same rows in the result."""
    lengths: RowLengths | None
    """Lengths of all that it published; None where it announced none."""


def other_columns_schema(schema: pa.Schema, ragged: Collection[str]) -> pa.Schema:
    """Return the columns that are not among the ``ragged`` ones, nor known from the statistics."""
    return pa.schema(
        [field for field in schema if field.name not in ragged and field.name not in IDENTITY]
    )


def unpack_row_lengths(
    headers: object,
    frames: Sequence[Frame],
    sources: int,
    schema: pa.Schema,
) -> dict[int, RowLengths]:
    """Return row lengths by source. PeerError when they are not of rows of ``schema``, from that
    many sources.
    """
    by_source: dict[int, RowLengths] = {}
    unread = list(frames)
    for header in headers if isinstance(headers, list | tuple) else [headers]:
        match header:
            case [int(source), str(domain), int(row_bytes), dict(groups), int(count), shared] if (
                0 <= source < sources
                and 0 <= row_bytes < MAX_ROW_ELEMENTS
                and -1 <= count <= len(unread)
                and _fit_schema(groups, count, schema)
            ):
                lengths = None
                if count >= 0:
                    lengths = []
                    for frame in unread[:count]:
                        lengths.append(unpack_ints(bytes(frame), MAX_ROW_ELEMENTS, 2**40))
                    unread = unread[count:]
                by_source[source] = RowLengths(
                    source=source,
                    domain=domain,
                    other_row_bytes=row_bytes,
                    offset_groups=groups,
                    group_lengths=lengths,
                    shared_table=unpack_shared_table(shared),
                )
            case _:
                raise PeerError(
                    f"received {str(header)[:120]!r} for the lengths of rows of {schema.names}"
                )
    if unread:
        raise PeerError(f"received {len(unread)} frames of row lengths that no source announced")
    return by_source


def _fit_schema(groups: Mapping[Any, Any], count: int, schema: pa.Schema) -> bool:
    """Return whether the columns are known, of variable-length types, each in one of ``count``
    groups (-1: any).
    """
    names = set(schema.names)
    for name, group in groups.items():
        if name not in names or element_width(schema.field(name).type) is None:
            return False
        if not isinstance(group, int) or group < 0 or 0 <= count <= group:
            return False
    return True


def pack_row_lengths(row_lengths: Iterable[RowLengths]) -> tuple[list[Any], list[Frame]]:
    """Return a header for each source's row lengths, and the frames of all of them."""
    headers: list[Any] = []
    frames: list[Frame] = []
    for lengths in row_lengths:
        header, own_frames = lengths.pack()
        headers.append(header)
        frames += own_frames
    return headers, frames
