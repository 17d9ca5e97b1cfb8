import asyncio
import gc
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from distributed import Scheduler, Worker
from hypothesis import given, settings

from siirl_dask.comms import wire
from siirl_dask.comms.sockets import Scheme
from siirl_dask.comms.wire import Pieces
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.carriers import HostCarrier, NetworkAccess, NetworkCarrier
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.errors import ConfigError, PeerError
from siirl_dask.testing.carriers import KEY, RUN, CarrierTests
from tests.coordinator.transport.comm_carriers import (
    MALFORMED,
    MEMBERS,
    NAME_OF_B,
    TCP,
    TLS,
    between_hosts,
    hello,
    nobody,
    on_host,
)

needs_sockets = pytest.mark.skipif(not shared_memory_domain(), reason="abstract sockets need Linux")
ASKED = Request(Op.SUBTREE_STATISTICS, KEY)


async def fine(request):
    return Reply({"fine": 1})


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


@needs_sockets
def test_a_worker_of_another_host_is_not_reached_over_a_socket():
    async def work():
        return await HostCarrier(RUN, "a", MEMBERS, nobody, timeout=60).reaches("b")

    assert not asyncio.run(asyncio.wait_for(work(), 10))


@needs_sockets
def test_a_worker_that_came_back_at_another_address_is_not_reached():
    async def work():
        async with on_host(fine):
            members = {**MEMBERS, "b": "tcp://elsewhere:1"}
            return await HostCarrier(RUN, "a", members, nobody, timeout=60).reaches("b")

    assert not asyncio.run(asyncio.wait_for(work(), 10))


@needs_sockets
@settings(max_examples=50, deadline=None)
@given(MALFORMED)
def test_malformed_messages_are_refused_and_the_next_peer_is_served(sent):
    async def work():
        async with on_host(fine) as (here, _):
            reader, writer = await asyncio.open_unix_connection(f"\0{NAME_OF_B}")
            writer.write(hello("asks") + sent)
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
            command = [sys.executable, "-c", textwrap.dedent(script), name, hello("asks").hex()]
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

    async def work():
        memory = memoryview(bytearray(2**26))
        sent = [Pieces([memory])]
        states = []

        async def handler(request):
            return Reply({}, [sent.pop()])

        async with between_hosts(handler) as (_here, _there, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello("asks") + message_of(ASKED))
            await reader.readexactly(len(hello("answers")) + 1000)
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
            one = NetworkCarrier(RUN, MEMBERS, fine, network, timeout=5)
            other = NetworkCarrier(RUN, MEMBERS, fine, network, timeout=5)
            ports = [await one.start(), await other.start()]
            assert first < ports[0] < ports[1] < first + 40
            full = NetworkCarrier(RUN, MEMBERS, fine, replace(TCP, ports=[first]), timeout=5)
            try:
                with pytest.raises(ConfigError, match=r"cannot listen on 127.0.0.1.*data\.port"):
                    await full.start()
            finally:
                await one.close()
                await other.close()

    asyncio.run(work())


def test_a_worker_listens_where_dask_does_and_is_asked_at_its_contact_address():
    async def work():
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
            Worker(
                scheduler.address,
                name="a",
                host="127.0.0.1",
                contact_address="tcp://127.0.0.2:4711",
            ) as worker,
        ):
            network = NetworkAccess.of(worker)
            assert (network.scheme, network.host) == (Scheme.TCP, "127.0.0.1")
            carrier = NetworkCarrier(RUN, {"a": worker.address}, fine, network, timeout=5)
            port = await carrier.start()
            carrier.meet({"a": port})
            await carrier.close()
            return carrier.address_of("a"), port

    address, port = asyncio.run(work())
    assert address == f"rows+tcp://127.0.0.2:{port}"
