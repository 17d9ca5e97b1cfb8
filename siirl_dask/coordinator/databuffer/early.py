"""Early rows of one worker: those that it hands over before their table is whole, and those that come to it so.

While a node makes rows, a link would be idle until the last one is there, and then all rows would move at once. Where
the node hands over what it has finished, this moves meanwhile to the target that each row prefers (see
``layout.preference``). The owners are computed afterwards from all rows as ever, so what came early changes nothing but
what is still to be fetched; where it went to another than the owner, it is dropped and fetched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pyarrow as pa

from siirl_dask.coordinator.databuffer.early_pull import EarlyBatch, EarlyPull
from siirl_dask.coordinator.databuffer.early_rows import EarlyRows
from siirl_dask.coordinator.databuffer.limits import Allowance, CopyThreads
from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.ragged import element_width
from siirl_dask.coordinator.databuffer.traffic import Traffic
from siirl_dask.coordinator.layout.preference import early_targets
from siirl_dask.coordinator.transport.messages import Reply, Request, TransitionKey, Transport
from siirl_dask.errors import PeerError
from siirl_dask.planner import Edge, Hosts
from siirl_dask.schema import ROW_ID


class Early:
    """One worker's early rows, of all edges and iterations. Belongs to the event loop.

    Args:
        prefetch: See ``data.prefetch``.
        memory: Bytes for rows that wait here to travel, or wait here for their owner to be known.
        message: Bytes of rows that are worth a message.
    """

    def __init__(
        self,
        worker: str,
        hosts: Hosts,
        transport: Transport,
        traffic: Traffic,
        copy_threads: CopyThreads,
        *,
        prefetch: bool | None,
        memory: int,
        message: int,
    ) -> None:
        self._worker = worker
        self._hosts = hosts
        self._transport = transport
        self._traffic = traffic
        self._copy_threads = copy_threads
        self._prefetch = prefetch
        self._message = message
        self.allowance = Allowance(memory)
        self._leaving: dict[TransitionKey, EarlyRows] = {}
        self._coming: dict[TransitionKey, EarlyPull] = {}
        self._closed = False

    def leaves(self, edge: Edge) -> bool:
        """Tell whether rows of an edge can leave this worker early."""
        return bool(_columns(edge) and early_targets(edge, self._worker, self._hosts, prefetch=self._prefetch))

    def moves(self, edge: Edge) -> bool:
        """Tell whether rows of an edge can leave this worker or come to it early."""
        return self.leaves(edge) or bool(_columns(edge) and any(self._gets(edge, source) for source in edge.sources))

    def hand_over(self, edge: Edge, key: TransitionKey, rows: pa.Table) -> None:
        """Let finished rows travel."""
        self._rows(edge, key).add(rows)

    async def answer(self, edge: Edge, request: Request) -> Reply:
        """Give a target the next rows. PeerError where the edge has no rows that leave this worker early."""
        if not self.leaves(edge):
            raise PeerError(
                f"asked for early rows of edge {request.key.edge}, of which worker {self._worker!r} has none"
            )
        return await self._rows(edge, request.key).answer(request.body)

    async def published(self, edge: Edge, key: TransitionKey, published: Published) -> None:
        """Stop handing over: all rows of a key can be pulled. NodeError when rows that left early are others."""
        if not self.leaves(edge):
            return
        rows = self._rows(edge, key)  # made here if nobody has asked yet: who asks later hears that no more will come
        rows.close()
        if published.table is not None:
            ids = published.statistics[ROW_ID].tolist()
            columns = {name: published.ragged_column(name)[0] for name in published.ragged_columns()}
            await self._copy_threads.run(published.nbytes, rows.check, ids, columns)

    def prefetch(self, edge: Edge, key: TransitionKey) -> None:
        """Begin to ask for the rows of an edge that will probably be this worker's."""
        sources = [source for source in edge.sources if self._gets(edge, source)]
        if sources and _columns(edge) and key not in self._coming and not self._closed:
            target = edge.targets.index(self._worker)
            given = (sources, _columns(edge), self._transport, self._traffic, self.allowance, self._message)
            self._coming[key] = EarlyPull(edge, key, target, *given)

    @asynccontextmanager
    async def arrived(self, key: TransitionKey) -> AsyncIterator[Mapping[str, Sequence[EarlyBatch]]]:
        """Give what has come of a key, by source, to use inside; it is freed afterwards. All sources have published."""
        if (pull := self._coming.get(key)) is None:
            yield {}
            return
        try:
            yield await pull.finish()
        finally:
            self._coming.pop(key, pull).drop()

    def forget(self, before: int) -> None:
        """Drop everything of iterations before sequence number ``before``."""
        for key in [key for key in self._leaving if key.sequence < before]:
            self._leaving.pop(key).close()
        for key in [key for key in self._coming if key.sequence < before]:
            self._coming.pop(key).drop()

    def close(self) -> None:
        """Stop asking and answering, and free all rows."""
        self._closed = True
        for rows in self._leaving.values():
            rows.close()
        for pull in self._coming.values():
            pull.drop()
        self._coming.clear()

    def _gets(self, edge: Edge, source: str) -> bool:
        return self._worker in early_targets(edge, source, self._hosts, prefetch=self._prefetch).values()

    def _rows(self, edge: Edge, key: TransitionKey) -> EarlyRows:
        """Return the rows of a key, made by whoever comes first: the node or a target."""
        if key not in self._leaving:
            targets = early_targets(edge, self._worker, self._hosts, prefetch=self._prefetch)
            given = (edge.sources.index(self._worker), _columns(edge), targets, self._message, self.allowance)
            self._leaving[key] = EarlyRows(edge, *given)
            if self._closed:
                self._leaving[key].close()
        return self._leaving[key]


def _columns(edge: Edge) -> list[str]:
    """Return the edge's columns that travel early: variable-length ones, which are heavy and lie row by row."""
    declared = edge.early.columns if edge.early else ()
    return [name for name in declared if element_width(edge.schema.field(name).type) is not None]
