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
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.coordinator.transport.dask_comms import DaskComms, serve
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.coordinator.transport.unix_sockets import UnixSockets, socket_name
from siirl_dask.testing.carriers import KEY, RUN, CarrierTests

needs_sockets = pytest.mark.skipif(not shared_memory_domain(), reason="abstract sockets need Linux")
MEMBERS = {"a": "tcp://a", "b": "tcp://b"}
NAME_OF_B = socket_name(RUN, "b", MEMBERS["b"])


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


class TestDaskComms(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with (
            Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler,
            Worker(scheduler.address, name="a", host="127.0.0.1") as here,
            Worker(scheduler.address, name="b", host="127.0.0.1") as there,
        ):
            serve(there, RUN, handler)
            comms = DaskComms(here, RUN, {"a": here.address, "b": there.address}, timeout=5)
            await comms.start()

            async def die():
                there.stop()
                for comm in list(there._comms):
                    comm.abort()

            try:
                yield comms, die
            finally:
                await comms.close()


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
            return await UnixSockets(RUN, "a", {**MEMBERS, "b": "tcp://elsewhere"}, None).reaches("b")

    assert not asyncio.run(work())


@needs_sockets
@settings(max_examples=50)
@given(
    st.binary(max_size=64)
    | st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=32)).map(
        lambda pair: struct.pack("<I", pair[0]) + pair[1]
    )
    | st.lists(st.integers(-1, 2**40) | st.text(max_size=3) | st.lists(st.integers(-5, 2**40)), max_size=4)
    .map(msgpack.packb)
    .map(lambda packed: struct.pack("<I", len(packed)) + packed)
)
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
        packed = msgpack.packb([0, ["up", 7, "train/a->b", {}], []])
        link.sendall(struct.pack("<I", len(packed)) + packed)
        print(link.recv(1))
    """

    async def work():
        async with connected(handler):
            command = [sys.executable, "-c", textwrap.dedent(script), NAME_OF_B.encode().hex()]
            return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)

    done = asyncio.run(work())
    assert done.stdout.strip() == "b''" or "reset" in done.stderr.lower() or "broken pipe" in done.stderr.lower()
