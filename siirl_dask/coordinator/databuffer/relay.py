"""Relays: a host with several targets of replicated rows takes them over the link once, and passes
them on inside.

Each target on the host takes the rows of some sources on other hosts (see ``layout.assignment``) and
publishes them again, in shared memory where it can, under a key of its own. The other targets pull
them from there as they would from a source. Part by part a relay acks the sources once every target
on its host has acked it: so a source that waits for acks still waits for all, and no relay piles up
parts that its neighbours have not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from siirl_dask.coordinator.databuffer.published import Published
from siirl_dask.coordinator.databuffer.pull import Puller
from siirl_dask.coordinator.databuffer.row_lengths import (
    RowLengths,
    RowOrigin,
    pack_row_lengths,
    unpack_row_lengths,
)
from siirl_dask.coordinator.layout.assignment import PullShare, row_statistics
from siirl_dask.coordinator.layout.host_routes import routes_to
from siirl_dask.coordinator.transport.messages import Op, Reply, Request, TransitionKey, Transport
from siirl_dask.coordinator.transport.peers import gather_or_cancel
from siirl_dask.errors import SiirlError
from siirl_dask.planner import Edge, Hosts

# between the name of an edge or a part and the relay's index among the targets of its host
_MARK = "@"


class Relays:
    """One worker's part among the relays of its host. Belongs to the event loop."""

    def __init__(
        self,
        *,
        worker: str,
        hosts: Hosts,
        transport: Transport,
        puller: Puller,
        slot: Callable[[TransitionKey], asyncio.Future[Published]],
        offer: Callable[[TransitionKey, Published], Awaitable[None]],
        inline_lengths: int,
    ) -> None:
        """``slot`` returns where a key's rows are published, ``offer`` publishes rows in shared
        memory; row lengths of more than ``inline_lengths`` bytes are sent only when they are asked
        for.
        """
        self._worker = worker
        self._hosts = hosts
        self._transport = transport
        self._puller = puller
        self._slot = slot
        self._offer = offer
        self._inline_lengths = inline_lengths
        self._acking: set[asyncio.Task[None]] = set()

    async def origins(
        self,
        edge: Edge,
        key: TransitionKey,
        share: PullShare,
        row_lengths: Mapping[int, RowLengths],
        *,
        part: bool,
    ) -> list[RowOrigin]:
        """Return where this worker takes the rows of its share from, once its relays have them.

        ``part``: the rows are a part of a table, whose sources wait for its acks.
        """
        routes = routes_to(self._worker, edge, self._hosts)
        direct: list[RowOrigin] = []
        by_relay: dict[int, list[RowOrigin]] = {}
        for source, positions in share.positions.items():
            origin = RowOrigin(
                worker=edge.sources[source],
                key=key,
                positions=positions,
                destinations=share.destinations[source],
                lengths=row_lengths.get(source),
            )
            if source in routes.relays:
                by_relay.setdefault(routes.relays[source], []).append(origin)
            else:
                direct.append(origin)
        relayed = await gather_or_cancel(
            *(
                self._relayed(
                    edge,
                    key,
                    origins,
                    targets=routes.targets,
                    index=index,
                    identity=share.identity,
                    part=part,
                )
                for index, origins in by_relay.items()
            )
        )
        return [*direct, *relayed]

    def answer(self, published: Published) -> Reply:
        """Send a target of this host the lengths of the rows that this worker passes on."""
        headers, frames = pack_row_lengths([published.row_lengths(0, self._inline_lengths)])
        return Reply({"row_lengths": headers}, frames)

    def close(self) -> None:
        for task in self._acking:
            task.cancel()

    async def _relayed(
        self,
        edge: Edge,
        key: TransitionKey,
        origins: Sequence[RowOrigin],
        *,
        targets: Sequence[str],
        index: int,
        identity: pa.Table,
        part: bool,
    ) -> RowOrigin:
        """Return the rows of ``origins`` as those of one relay, number ``index`` of ``targets`` on
        this host.

        It passes them on in the order of the result.
        """
        destinations = np.sort(np.concatenate([origin.destinations for origin in origins]))
        relayed = replace(key, edge=f"{key.edge}{_MARK}{index}")
        relay = targets[index]
        if relay == self._worker:
            renumbered = [
                replace(origin, destinations=np.searchsorted(destinations, origin.destinations))
                for origin in origins
            ]
            await self._pass_on(
                edge,
                relayed,
                renumbered,
                identity=identity.take(destinations),
                takers=len(targets),
                part=part,
            )
            reply = self.answer(self._slot(relayed).result())
        else:
            reply = await self._transport.request(relay, Request(Op.PASSED_ON, relayed))
        lengths = unpack_row_lengths(
            reply.header.get("row_lengths"), reply.plain_frames(), 1, edge.schema
        ).get(0)
        positions = np.arange(len(destinations))
        return RowOrigin(
            worker=relay,
            key=relayed,
            positions=positions,
            destinations=destinations,
            lengths=lengths,
        )

    async def _pass_on(
        self,
        edge: Edge,
        key: TransitionKey,
        origins: Sequence[RowOrigin],
        *,
        identity: pa.Table,
        takers: int,
        part: bool,
    ) -> None:
        """Pull rows over the link and publish them for this host. A failure reaches those who
        wait for them.
        """
        try:
            table = await self._puller.pull(edge, origins, identity, ack=False)
            published = Published(row_statistics(table, 0), table, unacked=table.num_rows * takers)
            await self._offer(key, published)
        except SiirlError as error:
            slot = self._slot(key)
            if not slot.done():
                slot.set_exception(error)
                slot.exception()  # marks it as seen: perhaps nobody waits
            raise
        acking = asyncio.create_task(self._ack(origins, published if part else None))
        self._acking.add(acking)
        acking.add_done_callback(self._acking.discard)

    async def _ack(self, origins: Sequence[RowOrigin], published: Published | None) -> None:
        """Ack the rows of all origins, once those that were published of them are acked by this
        host's targets.
        """
        if published is not None:
            await published.all_acked.wait()
        for origin in origins:
            self._puller.acks.add(origin.worker, origin.key, len(origin.positions))
        if published is not None:
            self._puller.acks.flush()  # the source makes the next part when this one is acked


def relay_of(name: str) -> tuple[str, int | None]:
    """Return the name of an edge or a part without a relay's index, and that index; None where
    it has none.
    """
    bare, mark, index = name.rpartition(_MARK)
    if mark and index.isdecimal() and index == str(int(index[:9])):
        return bare, int(index)
    return name, None
