"""Rows over UCX: what differs from sockets, and what strangers may do. UCX itself runs here, over
tcp; a cluster whose comms over UCX are others is stood in for by tcp under another name.
"""

import asyncio
import os
import socket
import sys
import time

import pytest
from distributed import Scheduler, Worker
from distributed.comm import registry
from distributed.comm.core import CommClosedError, connect, listen
from distributed.comm.tcp import TCPBackend, TCPConnector, TCPListener

from siirl_dask.comms import backends, listeners, wire
from siirl_dask.comms.access import NetworkAccess
from siirl_dask.comms.proofs import Side
from siirl_dask.comms.sockets import Scheme
from siirl_dask.comms.wire import Pieces
from siirl_dask.dask_internals import FatalCommClosedError
from tests.comms.ucxx_here import needs_ucxx

backends.register()
PLACE = "rows+ucxx://127.0.0.1:0"
ROWS = wire.MessageBounds(2**10, 2**28)


async def ignore(comm):
    """A listener that keeps its connections, and says nothing."""
    await asyncio.sleep(60)


async def stranger(listener):
    """A stream to a listener, of somebody who has not said who he is."""
    from siirl_dask.comms.ucxx_stream import UcxProgress

    _, port = listener.get_host_port()
    return UcxProgress.of_running_loop().stream_to("127.0.0.1", port)


@needs_ucxx
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        bytes(range(64)),
        wire.PRELUDE.pack(2**13, 0, wire.GREETING),
        b"".join(wire.pack(wire.GREETING, {"siirl_dask.wire": 1})),
    ],
)
def test_a_stranger_that_says_nothing_is_closed_and_one_that_says_too_much(said, monkeypatch):
    monkeypatch.setattr(listeners, "_HANDSHAKE_SECONDS", 0.5)
    monkeypatch.setattr(listeners, "_GRACE", 0.1)
    handled = []

    async def work():
        async with listen(PLACE, handled.append) as listener:
            stream = await stranger(listener)
            if said:
                await stream.write([memoryview(said)])
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(stream.read(2**12), 20)  # more than a handshake has
            assert stream.closed

    asyncio.run(work())
    assert handled == []


@needs_ucxx
def test_who_does_not_know_the_secret_is_refused_and_the_next_one_served():
    async def echo(comm):
        await comm.write(await comm.read())

    async def work():
        async with listen(PLACE, echo, secret=b"the run's") as listener:
            comm = await connect(listener.contact_address)
            with pytest.raises(FatalCommClosedError, match="no connection of this run"):
                await asyncio.wait_for(comm.authenticate(b"another", Side.ASKS), 20)
            comm = await connect(listener.contact_address)
            await comm.authenticate(b"the run's", Side.ASKS)
            await comm.write([1])
            assert await comm.read() == [1]
            comm.abort()

    asyncio.run(asyncio.wait_for(work(), 60))


@needs_ucxx
def test_bytes_that_are_not_of_ucx_reach_nobody():
    handled = []

    async def work():
        async with listen(PLACE, handled.append) as listener:
            with socket.create_connection(("127.0.0.1", listener.get_host_port()[1])) as sock:
                sock.sendall(os.urandom(2**12))
            await asyncio.sleep(0.1)
            comm = await connect(listener.contact_address)
            while not handled:
                await asyncio.sleep(0.01)
            comm.abort()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert len(handled) == 1


@needs_ucxx
def test_nothing_is_written_to_places_once_their_read_is_cancelled():
    """Their owner takes the memory for free then."""
    large = bytearray(b"x") * 2**26

    async def send(comm):
        await comm.send({}, [large])

    async def work():
        target = bytearray(len(large))
        async with listen(PLACE, send) as listener:
            comm = await connect(listener.contact_address)
            places = [Pieces([memoryview(target)])]
            reading = asyncio.create_task(comm.receive(ROWS, lambda head, sizes: places))
            while not target[0]:
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            assert comm.closed()
            written = bytes(target)
            await asyncio.sleep(0.2)
            assert bytes(target) == written
            assert not target[-1]

    asyncio.run(asyncio.wait_for(work(), 60))


@needs_ucxx
@pytest.mark.parametrize("lengths", [[1] * 5_000, [100_000, 3, 0, 70_000, 20_000, 1], [2**22]])
def test_pieces_arrive_in_places_that_are_cut_elsewhere(lengths):
    sent = os.urandom(sum(lengths))
    target = bytearray(len(sent))

    def cut(memory, sizes):
        views = []
        at = 0
        for size in sizes:
            views.append(memoryview(memory)[at : at + size])
            at += size
        return Pieces(views)

    async def send(comm):
        await comm.send({}, [cut(sent, lengths)])

    async def work():
        async with listen(PLACE, send) as listener:
            comm = await connect(listener.contact_address)
            places = [cut(target, reversed(lengths))]
            await comm.receive(ROWS, lambda head, sizes: places)
            comm.abort()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert bytes(target) == sent


@needs_ucxx
def test_what_a_peer_sent_before_it_closed_is_read():
    async def send(comm):
        for number in range(3):
            await comm.write([number])
        comm.abort()

    async def work():
        async with listen(PLACE, send) as listener:
            comm = await connect(listener.contact_address)
            read = [await comm.read() for _ in range(3)]
            with pytest.raises(CommClosedError):
                await comm.read()
            return read

    assert asyncio.run(asyncio.wait_for(work(), 60)) == [[0], [1], [2]]


@needs_ucxx
def test_a_port_that_is_taken_and_encryption_that_is_demanded_are_errors():
    async def work():
        with socket.create_server(("0.0.0.0", 0)) as taken:
            address = f"rows+ucxx://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(OSError, match="cannot listen on port") as raised:
                await listen(address, ignore).start()
            assert raised.value.errno == 98  # the next port of a range is tried
        with pytest.raises(RuntimeError, match="encryption required"):
            listen(PLACE, ignore, require_encryption=True)
        with pytest.raises(RuntimeError, match="encryption required"):
            await connect("rows+ucxx://127.0.0.1:1", require_encryption=True)
        with pytest.raises(OSError):  # noqa: PT011
            await connect("rows+ucxx://127.0.0.1:1", timeout=0.3)

    asyncio.run(asyncio.wait_for(work(), 60))


@needs_ucxx
def test_ucx_ends_with_its_last_connection_and_costs_nothing_while_none_speaks():
    from siirl_dask.comms.ucxx_stream import UcxProgress

    async def work():
        async with listen(PLACE, ignore) as listener:
            comm = await connect(listener.contact_address)
            reading = asyncio.create_task(comm.read())
            assert comm._stream._progress is UcxProgress.of_running_loop()
            before = time.thread_time()
            await asyncio.sleep(0.5)
            assert time.thread_time() - before < 0.1
            comm.abort()
            with pytest.raises(CommClosedError):
                await reading
        while asyncio.get_running_loop() in UcxProgress.running:
            await asyncio.sleep(0.01)

    for _ in range(2):  # a second loop has one of its own
        asyncio.run(asyncio.wait_for(work(), 60))


@needs_ucxx
def test_a_connection_that_comes_as_its_listener_stops_is_closed():
    handled = []

    async def work():
        async with listen(PLACE, handled.append) as listener:
            stream = await stranger(listener)
            while not listener._handshakes:
                await asyncio.sleep(0.01)
            late = await stranger(listener)
        for each in (stream, late):
            with pytest.raises(ConnectionError):
                await asyncio.wait_for(each.read(2**12), 20)

    asyncio.run(asyncio.wait_for(work(), 60))
    assert handled == []


class UcxConnector(TCPConnector):
    prefix = "ucx://"


class UcxListener(TCPListener):
    prefix = "ucx://"


class UcxBackend(TCPBackend):
    """Dask's tcp under the name of its comms over UCX."""

    _connector_class = UcxConnector
    _listener_class = UcxListener


@pytest.mark.parametrize("installed", [pytest.param(True, marks=needs_ucxx), False])
def test_a_cluster_that_speaks_ucx_is_never_refused(installed, monkeypatch):
    """Its rows go over UCX where ucxx is installed, and over tcp next to it where it is not."""
    monkeypatch.setitem(registry.backends, "ucx", UcxBackend())
    if not installed:
        monkeypatch.setitem(sys.modules, "ucxx", None)

    async def work():
        async with (
            Scheduler(
                protocol="ucx", host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0"
            ) as scheduler,
            Worker(scheduler.address, name="a", host="127.0.0.1") as worker,
        ):
            assert worker.address.startswith("ucx://127.0.0.1:")
            return NetworkAccess.of(worker).scheme

    assert asyncio.run(work()) is (Scheme.UCXX if installed else Scheme.TCP)
