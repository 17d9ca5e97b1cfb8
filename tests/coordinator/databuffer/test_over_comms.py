"""Tables that databuffers hand over through real carriers: equal to the bit on each of them."""

import asyncio
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pyarrow as pa
import pytest

from siirl_dask.comms.wire import Pieces
from siirl_dask.config import TransportMode
from siirl_dask.coordinator.databuffer.databuffer import Databuffer
from siirl_dask.coordinator.databuffer.limits import BufferLimits
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.carriers import HostCarrier, NetworkCarrier
from siirl_dask.coordinator.transport.messages import Op
from siirl_dask.coordinator.transport.peers import PeerTransport
from siirl_dask.planner import Rows
from tests.comms.ucxx_here import needs_ucxx
from tests.coordinator.rows import ITERATION, SCHEMA, edge, make_rows, names, scatter
from tests.coordinator.transport.comm_carriers import SECRET, TCP, TLS, UCXX

NETWORKS = {"rows+tcp": TCP, "rows+tls": TLS, "rows+ucxx": UCXX}
OVER_UCXX = pytest.param("rows+ucxx", marks=needs_ucxx)
ON_HOST = pytest.param(
    "rows+unix",
    marks=pytest.mark.skipif(not shared_memory_domain(), reason="abstract sockets need Linux"),
)


def make_long_rows(count):
    """Rows whose numbers and images are long, and whose other columns are short, with empty ones
    among them.
    """
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 6000, count) * (np.arange(count) % 5 > 0)
    table = make_rows(count)
    columns = {
        "ids": pa.array([rng.integers(0, 99, n) for n in lengths], SCHEMA.field("ids").type),
        "image": pa.array([rng.bytes(4 * n) for n in lengths], SCHEMA.field("image").type),
    }
    for name, values in columns.items():
        table = table.set_column(table.column_names.index(name), SCHEMA.field(name), values)
    return table


@asynccontextmanager
async def joined(scheme, e, limits):
    """A databuffer for each worker of an edge, and the frames of rows that each was sent."""
    workers = sorted({*e.sources, *e.targets})
    members = {worker: f"tcp://127.0.0.1:{1 + n}" for n, worker in enumerate(workers)}
    buffers, carriers, sent = {}, {}, []

    async def answer(worker, request):
        reply = await buffers[worker].handle(request)
        if request.op == Op.FETCH:
            sent.extend(type(frame) for frame in reply.frames)
        return reply

    transports = []
    for worker in workers:
        handler = partial(answer, worker)
        if scheme in NETWORKS:
            network = NETWORKS[scheme]
            carriers[worker] = NetworkCarrier(
                "run", members, handler, network, timeout=9, secret=SECRET
            )
        else:
            carriers[worker] = HostCarrier(
                "run", worker, members, handler, timeout=9, secret=SECRET
            )
        transport = PeerTransport("run", members, [carriers[worker]], peer_timeout=9)
        transports.append(transport)
        buffers[worker] = Databuffer(
            "run",
            worker,
            {f"train/{e.name}": e},
            transport,
            transport_mode=TransportMode.dask,
            limits=limits,
        )
    try:
        ports = {worker: await carrier.start() for worker, carrier in carriers.items()}
        for carrier in carriers.values():
            if scheme in NETWORKS:
                carrier.meet(ports)
        yield buffers, sent
    finally:
        for buffer in buffers.values():
            buffer.close()
        for transport in transports:
            await transport.close()


@pytest.mark.parametrize("scheme", ["rows+tcp", "rows+tls", OVER_UCXX, ON_HOST])
def test_long_and_short_rows_arrive_equal_to_the_bit(scheme):
    """Some are received into their places, some copied there; a message holds a few rows."""
    e, table = edge(names(2), names(3, 1), Rows.BALANCED), make_long_rows(60)

    async def work():
        async with joined(scheme, e, BufferLimits(message=2**18)) as (buffers, sent):
            for source, part in scatter(table, e.sources).items():
                await buffers[source].publish(e, ITERATION, part)
            pulls = [buffers[target].pull(e, e, ITERATION) for target in e.targets]
            parts = await asyncio.gather(*pulls)
            for buffer in buffers.values():
                await buffer.wait_for_acks()
            assert [buffer.unacked_bytes for buffer in buffers.values()] == [0] * len(buffers)
            return parts, sent

    parts, sent = asyncio.run(work())
    assert pa.concat_tables(parts).sort_by("row_id").equals(table)
    for part in parts:
        part.validate(full=True)
    assert Pieces in sent
    assert memoryview in sent


def test_a_spilled_table_is_copied_before_it_is_sent():
    """The event loop sends: it would wait for pages of the file."""
    e, table = edge(("0",), ("1",), Rows.BALANCED), make_long_rows(60)

    async def work():
        async with joined("rows+tcp", e, BufferLimits(memory=2**20)) as (buffers, sent):
            await buffers["0"].publish(e, ITERATION, table)
            assert buffers["0"].unacked_bytes == 0  # it is in a file
            return await buffers["1"].pull(e, e, ITERATION), sent

    pulled, sent = asyncio.run(work())
    assert pulled.equals(table)
    assert Pieces not in sent
