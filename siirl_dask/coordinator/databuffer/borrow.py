"""A target's side of rows that are read where they lie: tables over the memory of sources, and giving it back."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from siirl_dask.config import Way
from siirl_dask.coordinator.arena import Attachments, Bytes, CannotMap, shared_memory_domain
from siirl_dask.coordinator.balance import Ints
from siirl_dask.coordinator.cells import cell_width, column_of
from siirl_dask.coordinator.description import Description, plain_schema
from siirl_dask.coordinator.lending import ALIGNMENT, Loan
from siirl_dask.coordinator.messages import TransitionKey
from siirl_dask.coordinator.published import Published
from siirl_dask.coordinator.releases import Releases
from siirl_dask.coordinator.statistics import Share
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge

logger = logging.getLogger("siirl_dask.coordinator")


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Rows of one source, read where they lie."""

    source: str
    rows: Ints
    """Positions in what the source published."""
    places: Ints
    """Of the same rows: index into the result."""
    columns: Mapping[str, pa.ChunkedArray]
    """Those that are runs of bytes, of all that the source published."""
    plain: pa.Table
    """The other columns, of ``rows``."""
    nbytes: int
    """Of ``rows``, but for the plain columns."""


class Borrower:
    """Of one worker. ``own`` gives what the worker itself published, once it has."""

    def __init__(
        self, worker: str, own: Callable[[TransitionKey], Awaitable[Published]], releases: Releases, way: Way
    ) -> None:
        self._worker = worker
        self._own = own
        self._releases = releases
        self._way = way
        self._attachments = Attachments(writable=False)

    async def borrow(
        self, edge: Edge, key: TransitionKey, source: int, share: Share, about: Description | None
    ) -> Borrowed | None:
        """None when the source lends nothing, or not to this process. PeerError for a loan that cannot be."""
        if about is None or about.loan is None or about.patterns is None or self._way is Way.dask:
            return None
        worker, rows, places = edge.sources[source], share.by_source[source], share.places[source]
        nbytes = sum(
            int(lengths.sum()) * (cell_width(edge.schema.field(name).type) or 0)
            for name, lengths in about.lengths(rows).items()
        )
        if worker == self._worker:
            published = await self._own(key)
            columns = {name: published.lent_column(name) for name in about.columns}
            return Borrowed(worker, rows, places, columns, published.plain(rows), nbytes)
        if about.domain != shared_memory_domain():
            return None
        try:
            columns, plain = self._map(edge, key, worker, len(rows), about, about.loan)
            return Borrowed(worker, rows, places, columns, plain.take(pa.array(rows)), nbytes)
        except CannotMap as error:
            if self._way is Way.shm:
                raise PeerError(
                    f"data.transport=shm, but memory of worker {worker!r} cannot be read: {error}"
                ) from error
            logger.warning("rows of worker %r are asked for: %s", worker, error)
            return None
        except (pa.ArrowException, IndexError) as error:
            error.__traceback__ = None  # its frames refer to the memory
            raise PeerError(f"edge {edge.name}: what worker {worker!r} lends is no table: {error}") from error

    def _map(
        self, edge: Edge, key: TransitionKey, worker: str, count: int, about: Description, loan: Loan
    ) -> tuple[dict[str, pa.ChunkedArray], pa.Table]:
        """The columns of all rows of a source, and the plain ones."""
        assert about.patterns is not None
        mapped = self._attachments.attach(loan.handle)
        lease = _Lease(mapped)
        loop = asyncio.get_running_loop()
        weakref.finalize(lease, _give_back, loop, self._releases, worker, key, count).atexit = False
        columns = {}
        for name, pattern in about.columns.items():
            field, lengths = edge.schema.field(name), about.patterns[pattern]
            size = int(lengths.sum(dtype=np.float64)) * (cell_width(field.type) or 0)  # integers could overflow
            start = loan.columns.get(name)
            if start is None or start % ALIGNMENT or start + size > len(mapped):
                raise IndexError(f"column {name!r} lies outside of the segment, or not at a multiple of {ALIGNMENT}")
            columns[name] = column_of(field.type, lengths, _buffer(lease, start, size))
        if loan.plain + loan.plain_size > len(mapped):
            raise IndexError("the plain columns lie outside of the segment")
        schema = plain_schema(edge.schema, about.columns)
        return columns, _read_plain(mapped[loan.plain : loan.plain + loan.plain_size], schema, about.rows)


class _Lease:
    """What a target holds of a source's rows: it lives as long as any of their memory is referred to."""

    __slots__ = ("__weakref__", "mapped")

    def __init__(self, mapped: Bytes) -> None:
        self.mapped = mapped


def _buffer(lease: _Lease, start: int, size: int) -> pa.Buffer:
    return pa.foreign_buffer(lease.mapped.ctypes.data + start, size, lease)


def _give_back(
    loop: asyncio.AbstractEventLoop, releases: Releases, worker: str, key: TransitionKey, count: int
) -> None:
    def give_back() -> None:
        releases.note(worker, key, count)
        releases.flush()

    with suppress(RuntimeError):  # the loop is closed: the run is over
        loop.call_soon_threadsafe(give_back)


def _read_plain(stream: Bytes, schema: pa.Schema, rows: int) -> pa.Table:
    """A copy, which nobody can change while it is looked at."""
    if not len(schema):
        return pa.table({"": pa.nulls(rows)}).select([])
    table = ipc.open_stream(stream.tobytes()).read_all()
    if table.schema != schema or table.num_rows != rows:
        raise pa.ArrowInvalid(f"{table.num_rows} rows of {table.schema.names} instead of {rows} of {schema.names}")
    table.validate(full=True)
    return table


def in_runs(pieces: Sequence[tuple[Ints, Ints, pa.ChunkedArray]], kind: pa.DataType) -> pa.ChunkedArray:
    """Row ``rows[i]`` of a piece's column goes to ``places[i]``: the whole in order, as slices."""
    places = np.concatenate([places for places, _, _ in pieces])
    rows = np.concatenate([rows for _, rows, _ in pieces])
    piece = np.repeat(np.arange(len(pieces)), [len(rows) for _, rows, _ in pieces])
    order = np.argsort(places)
    rows, piece = rows[order], piece[order]
    starts = np.flatnonzero(np.concatenate(([True], (rows[1:] != rows[:-1] + 1) | (piece[1:] != piece[:-1]))))
    ends = np.append(starts[1:], len(rows))
    chunks: list[pa.Array] = []
    for which, row, count in zip(piece[starts].tolist(), rows[starts].tolist(), (ends - starts).tolist(), strict=True):
        chunks += pieces[which][2].slice(row, count).chunks
    return pa.chunked_array(chunks, kind)
