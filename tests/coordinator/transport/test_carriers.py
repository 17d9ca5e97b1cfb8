import asyncio
import gc
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace

import pytest
from distributed import Scheduler, Worker
from hypothesis import given, settings

from siirl_dask.comms import listeners, wire
from siirl_dask.comms.access import NetworkAccess
from siirl_dask.comms.proofs import Side
from siirl_dask.comms.wire import Pieces
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.carriers import HostCarrier, NetworkCarrier
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.coordinator.transport.peers import answers
from siirl_dask.errors import ConfigError, PeerError
from siirl_dask.testing.carriers import KEY, RUN, CarrierTests
from tests.comms.ucxx_here import needs_ucxx
from tests.coordinator.transport.comm_carriers import (
    HELLO,
    MALFORMED,
    MEMBERS,
    NAME_OF_B,
    SECRET,
    TCP,
    TLS,
    UCXX,
    between_hosts,
    fine,
    introduce,
    links,
    nobody,
    on_host,
    peer_that,
)

needs_sockets = pytest.mark.skipif(not shared_memory_domain(), reason="abstract sockets need Linux")
ASKED = Request(Op.SUBTREE_STATISTICS, KEY)


def asker(members=MEMBERS, timeout=60):
    """The carrier of worker "a" to others of its host."""
    return HostCarrier(RUN, "a", members, nobody, timeout, secret=SECRET)


@needs_sockets
class TestHostCarrier(CarrierTests):
    joined = staticmethod(on_host)


class TestNetworkCarrier(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with between_hosts(handler) as (here, there, _):
            yield here, there.close


class TestNetworkCarrierOverTls(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with between_hosts(handler, TLS) as (here, there, _):
            yield here, there.close


@needs_ucxx
class TestNetworkCarrierOverUcxx(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with between_hosts(handler, UCXX) as (here, there, _):
            yield here, there.close


@needs_sockets
def test_a_worker_of_another_host_is_not_reached_over_a_socket():
    async def work():
        return await asker().reaches("b")

    assert not asyncio.run(asyncio.wait_for(work(), 10))


@needs_sockets
def test_a_worker_that_ends_before_it_is_asked_is_gone_and_not_taken_for_one_of_another_host():
    async def work():
        async with on_host(fine) as (here, stop):
            here.meet()
            await stop()
            assert await here.reaches("b")
            with pytest.raises(OSError, match="no process of this host listens"):
                await here.ask("b", ASKED)

    asyncio.run(asyncio.wait_for(work(), 10))


@needs_sockets
def test_a_worker_that_came_back_at_another_address_is_not_reached():
    async def work():
        async with on_host(fine):
            members = {**MEMBERS, "b": "tcp://elsewhere:1"}
            return await asker(members).reaches("b")

    assert not asyncio.run(asyncio.wait_for(work(), 10))


@needs_sockets
@settings(max_examples=50, deadline=None)
@given(MALFORMED)
def test_malformed_messages_are_refused_and_the_next_peer_is_served(sent):
    async def work():
        async with on_host(fine) as (here, _):
            reader, writer = await asyncio.open_unix_connection(f"\0{NAME_OF_B}")
            await introduce(reader, writer)
            writer.write(sent)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert await here.reaches("b")
            return (await here.ask("b", ASKED)).header

    assert asyncio.run(work()) == {"fine": 1}


@needs_sockets
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_answered(caplog):
    async def handler(request):
        raise AssertionError("a stranger was heard")

    script = """
        import os, socket, sys
        os.setuid(65534)
        link = socket.socket(socket.AF_UNIX)
        link.connect(bytes.fromhex(sys.argv[1]))
        link.sendall(bytes.fromhex(sys.argv[2]))
        print(link.recv(1))
    """

    async def work():
        async with on_host(handler):
            name = f"\0{NAME_OF_B}".encode().hex()
            command = [sys.executable, "-c", textwrap.dedent(script), name, HELLO.hex()]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60
            )

    done = asyncio.run(work())
    assert (
        done.stdout.strip() == "b''"
        or "reset" in done.stderr.lower()
        or "broken pipe" in done.stderr.lower()
    )
    assert "of user 65534 was refused" in caplog.text


def places_of(target):
    return lambda header, sizes: [Pieces([memoryview(target)])]


def test_a_reply_that_does_not_fit_its_places_writes_none_of_them():
    async def handler(request):
        return Reply({}, [b"x" * 8000])

    async def work():
        target = bytearray(7999)
        async with between_hosts(handler) as (here, *_):
            with pytest.raises(PeerError, match="received 8000 bytes of rows: expected 7999"):
                await here.ask("b", replace(ASKED, places=places_of(target)))
            await asyncio.sleep(0.05)
            assert not any(target)
            assert (await here.ask("b", ASKED)).nbytes == 8000  # over another connection

    asyncio.run(work())


def test_nothing_is_written_to_places_once_the_request_is_cancelled():
    """Their owner takes the memory for free then."""
    large = bytearray(b"x") * 2**26

    async def handler(request):
        return Reply({}, [large])

    async def work():
        target = bytearray(len(large))
        async with between_hosts(handler) as (here, *_):
            request = replace(ASKED, row_bytes=len(large), places=places_of(target))
            asking = asyncio.create_task(here.ask("b", request))
            while not target[0]:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            written = bytes(target)
            await asyncio.sleep(0.1)
            assert bytes(target) == written
            assert not target[-1]

    asyncio.run(work())


def test_what_is_sent_from_where_it_lies_is_referred_to_until_it_is_out():
    """Its bytes count against a budget until then, and no longer."""
    gc.collect()  # of earlier tests

    async def work():
        memory = memoryview(bytearray(2**26))
        sent = [Pieces([memory])]
        states = []

        async def handler(request):
            return Reply({}, [sent.pop()])

        async with between_hosts(handler) as (_here, _there, port):
            ((reader, writer),) = await links(port)
            writer.write(message_of(ASKED))
            await reader.readexactly(1000)
            states.append(pieces_alive())
            while await reader.read(2**20):
                states.append(pieces_alive())
                if not states[-1]:
                    break
            writer.close()
        return states

    states = asyncio.run(work())
    assert states[0] == 1
    assert states[-1] == 0


def message_of(request):
    return b"".join(wire.pack(0, request.pack()))


def pieces_alive():
    return sum(type(item) is Pieces for item in gc.get_objects())


def test_a_peer_that_closes_an_idle_connection_is_asked_over_another():
    async def work():
        async with between_hosts(fine) as (here, there, _):
            await here.ask("b", ASKED)
            for comm in list(there._served):
                comm.abort()
            await asyncio.sleep(0.05)
            return (await here.ask("b", Request(Op.ACK, KEY))).header

    assert asyncio.run(work()) == {"fine": 1}


def test_workers_of_a_host_take_the_first_free_ports_of_a_range():
    async def work():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            first = taken.getsockname()[1]
            network = replace(TCP, ports=range(first, first + 40))
            one = NetworkCarrier(RUN, MEMBERS, fine, network, timeout=5, secret=SECRET)
            other = NetworkCarrier(RUN, MEMBERS, fine, network, timeout=5, secret=SECRET)
            ports = [await one.start(), await other.start()]
            assert first < ports[0] < ports[1] < first + 40
            network = replace(TCP, ports=[first])
            full = NetworkCarrier(RUN, MEMBERS, fine, network, timeout=5, secret=SECRET)
            try:
                with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1.*data\.port"):
                    await full.start()
            finally:
                await one.close()
                await other.close()

    asyncio.run(work())


async def listen_as(worker):
    """The address that a Dask worker's carrier is asked at, and a host that it listens on."""
    network = NetworkAccess.of(worker)
    carrier = NetworkCarrier(RUN, {"a": worker.address}, fine, network, timeout=5, secret=SECRET)
    port = await carrier.start()
    host, _ = carrier._listener.get_host_port()
    carrier.meet({"a": port})
    await carrier.close()
    return carrier.address_of("a").replace(str(port), "PORT"), host


@pytest.mark.parametrize(
    ("host", "contact", "listens_on"),
    [
        ("127.0.0.1", "127.0.0.2", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1", "127.0.0.1"),  # a plain ``dask worker``
        ("0.0.0.0", "203.0.113.5", "0.0.0.0"),  # an address of another machine, by RFC 5737
        ("0.0.0.0", "localhost", "0.0.0.0"),
    ],
)
def test_a_worker_listens_on_one_interface_and_is_asked_at_its_contact_address(
    host, contact, listens_on
):
    async def work():
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
            Worker(
                scheduler.address,
                name="a",
                host=host,
                contact_address=f"tcp://{contact}:4711",
            ) as worker,
        ):
            return await listen_as(worker)

    assert asyncio.run(work()) == (f"rows+tcp://{contact}:PORT", listens_on)


def test_a_connection_that_is_lost_before_its_request_is_opened_again():
    """Also for a request that may not be repeated: none was sent."""
    met = []

    async def speak(reader, writer):
        met.append(writer)
        if len(met) < 3:
            writer.close()
            return
        await introduce(reader, writer, Side.ANSWERS)
        await reader.read(1)
        writer.write(b"".join(wire.pack(0, {"fine": 1})))

    async def work():
        async with peer_that(speak) as here:
            reply = await asyncio.wait_for(here.ask("b", Request(Op.ACK, KEY)), 20)
            met[-1].close()
            return reply.header

    assert asyncio.run(work()) == {"fine": 1}
    assert len(met) == 3


def test_a_connection_that_opens_when_its_carrier_is_closed_is_closed_too():
    async def work():
        met = asyncio.Event()
        closed = asyncio.Event()
        heard = asyncio.get_running_loop().create_future()

        async def speak(reader, writer):
            met.set()
            await closed.wait()
            await introduce(reader, writer, Side.ANSWERS)
            heard.set_result(await reader.read())
            writer.close()

        async with peer_that(speak) as here:
            asking = asyncio.create_task(here.ask("b", ASKED))
            await met.wait()
            await here.close()
            closed.set()
            with pytest.raises(OSError):  # noqa: PT011
                await asyncio.wait_for(asking, 20)
            return await asyncio.wait_for(heard, 20)

    assert asyncio.run(work()) == b""


def test_a_handshake_of_tls_that_is_under_way_ends_with_its_carrier(monkeypatch):
    monkeypatch.setattr(listeners, "_HANDSHAKE_SECONDS", 600)

    async def work():
        async with between_hosts(fine, TLS) as (_, there, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            while not there._listener._handshakes:
                await asyncio.sleep(0.01)
            await there.close()
            assert await asyncio.wait_for(reader.read(), 20) == b""
            writer.close()

    asyncio.run(work())


@contextmanager
def peer_that_stands_still():
    """The listener of worker "b", which takes no connection."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{NAME_OF_B}")
        listener.listen(2)
        listener.setblocking(False)
        yield listener


@needs_sockets
def test_pings_to_a_peer_that_stands_still_take_one_place_in_its_queue():
    """Whatever is closed stays there, and nobody else's request gets in when it is full."""

    async def ping(carrier):
        await carrier.ask("b", Request(Op.PING, KEY))
        return True

    async def work():
        carrier = asker()
        for _ in range(3):
            assert not await answers(lambda: ping(carrier), 0.2)
        await carrier.close()

    with peer_that_stands_still() as listener:
        asyncio.run(work())
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


@needs_sockets
def test_a_full_queue_of_a_peer_that_stands_still_is_waited_for():
    async def work(listener):
        carrier = asker(timeout=0.2)
        with ExitStack() as queue:
            with suppress(BlockingIOError):
                while True:
                    sock = queue.enter_context(socket.socket(socket.AF_UNIX))
                    sock.setblocking(False)
                    sock.connect(f"\0{NAME_OF_B}")
            asking = asyncio.create_task(carrier.ask("b", ASKED))
            await asyncio.wait([asking], timeout=1.0)
            assert not asking.done()
            assert await carrier.runs("b", 1.0)
            listener.close()
            with pytest.raises(OSError, match="no process of this host listens"):
                await asyncio.wait_for(asking, 20)
            await carrier.close()

    with peer_that_stands_still() as listener:
        asyncio.run(work(listener))
