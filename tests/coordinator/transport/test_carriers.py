import asyncio
import os
import struct
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager

import msgpack
import pytest
from distributed import Scheduler, Worker
from distributed.security import Security
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.dask_streams import DaskStreams
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.coordinator.transport.unix_sockets import UnixSockets, socket_name
from siirl_dask.testing.carriers import KEY, RUN, CarrierTests

needs_sockets = pytest.mark.skipif(not shared_memory_domain(), reason="abstract sockets need Linux")
MEMBERS = {"a": "tcp://a", "b": "tcp://b"}
SECURITY = Security.temporary()
NAME_OF_B = socket_name(RUN, "b", MEMBERS["b"])


heads = st.binary(max_size=32) | st.recursive(
    st.integers(-(2**63), 2**63)
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.floats()
    | st.none(),
    lambda item: (
        st.lists(item, max_size=3) | st.dictionaries(st.text(max_size=3), item, max_size=3)
    ),
    max_leaves=6,
).map(msgpack.packb)
MALFORMED = st.binary(max_size=64) | st.builds(
    lambda head, count, number, sizes, body: (
        struct.pack("<IIQ", len(head) if count is None else count, len(sizes), number)
        + struct.pack(f"<{len(sizes)}Q", *sizes)
        + head
        + body
    ),
    heads,
    st.none() | st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.lists(st.integers(0, 64) | st.integers(0, 2**64 - 1), max_size=3),
    st.binary(max_size=64),
)
"""Random bytes, and messages of which something is not as it says."""


@asynccontextmanager
async def connected(handler):
    async def nobody(request):
        raise AssertionError("nobody asks a")

    here, there = UnixSockets(RUN, "a", MEMBERS, nobody), UnixSockets(RUN, "b", MEMBERS, handler)
    await here.start()
    await there.start()
    try:
        yield here, there.close
    finally:
        await here.close()
        await there.close()


@needs_sockets
class TestUnixSockets(CarrierTests):
    joined = staticmethod(connected)


@asynccontextmanager
async def streaming(handler, **security):
    """Workers "a" and "b" of a cluster, and the streams of both; "b" answers with ``handler``."""
    async with (
        Scheduler(
            host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0", **security
        ) as scheduler,
        Worker(scheduler.address, name="a", host="127.0.0.1", **security) as here,
        Worker(scheduler.address, name="b", host="127.0.0.1", **security) as there,
    ):
        members = {"a": here.address, "b": there.address}
        streams = [
            DaskStreams(worker, RUN, members, handler, timeout=5) for worker in (here, there)
        ]
        ports = dict(zip(members, [await each.start() for each in streams], strict=True))
        try:
            for each in streams:
                each.meet(ports)
            yield *streams, ports["b"]
        finally:
            for each in streams:
                await each.close()


class TestDaskStreams(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with streaming(handler) as (here, there, _):
            yield here, there.close


class TestDaskStreamsOverTls(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with streaming(handler, protocol="tls://", security=SECURITY) as (here, there, _):
            yield here, there.close


@needs_sockets
def test_a_worker_of_another_host_is_not_reached_over_a_socket():
    async def work():
        return await UnixSockets(RUN, "a", MEMBERS, None).reaches("b")

    assert not asyncio.run(work())


@needs_sockets
def test_a_worker_that_came_back_at_another_address_is_not_reached():
    async def handler(request):
        return Reply()

    async def work():
        async with connected(handler):
            return await UnixSockets(RUN, "a", {**MEMBERS, "b": "tcp://elsewhere"}, None).reaches(
                "b"
            )

    assert not asyncio.run(work())


@needs_sockets
@settings(max_examples=50)
@given(MALFORMED)
def test_malformed_messages_are_refused_and_the_next_peer_is_served(sent):
    async def handler(request):
        return Reply({"fine": 1})

    async def work():
        async with connected(handler) as (here, _):
            reader, writer = await asyncio.open_unix_connection(NAME_OF_B)
            writer.write(sent)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
            assert await here.reaches("b")
            return (await here.ask("b", Request(Op.SUBTREE_STATISTICS, KEY))).header

    assert asyncio.run(work()) == {"fine": 1}


@needs_sockets
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_process_of_another_user_is_not_answered():
    async def handler(request):
        raise AssertionError("a stranger was heard")

    script = """
        import os, socket, struct, sys, msgpack
        os.setuid(65534)
        link = socket.socket(socket.AF_UNIX)
        link.connect(bytes.fromhex(sys.argv[1]))
        packed = msgpack.packb([0, ["up", 7, "train/a->b", {}]])
        link.sendall(struct.pack("<IIQ", len(packed), 0, 0) + packed)
        print(link.recv(1))
    """

    async def work():
        async with connected(handler):
            command = [sys.executable, "-c", textwrap.dedent(script), NAME_OF_B.encode().hex()]
            return await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=60
            )

    done = asyncio.run(work())
    assert (
        done.stdout.strip() == "b''"
        or "reset" in done.stderr.lower()
        or "broken pipe" in done.stderr.lower()
    )
