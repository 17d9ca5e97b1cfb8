"""How a stream waits: when the kernel wakes it, and how the task that waits goes on."""

import asyncio
import socket
from contextlib import asynccontextmanager

import pytest
from distributed.comm.core import CommClosedError

from siirl_dask.comms.byte_stream import ByteStream
from siirl_dask.comms.rows_comm import WhileOpen


@asynccontextmanager
async def connected():
    """A stream over tcp, and the socket of its peer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        here, _ = listener.accept()
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = ByteStream(here)
    try:
        yield stream, there
    finally:
        stream.close()
        there.close()


@pytest.mark.parametrize("last", [1, 5_000, 9_000, 100_000])
def test_the_last_bytes_of_a_long_message_wake_their_reader_however_few_they_are(last):
    """The kernel is told to wake it for many bytes at once, as long as many are missing."""
    sent = bytes(range(256)) * 4_000

    async def work():
        async with connected() as (stream, there):
            place = bytearray(len(sent))
            reading = asyncio.create_task(stream.read_into([memoryview(place)]))
            at = 0
            for step in (len(sent) - last, last // 2, last - last // 2):
                await asyncio.sleep(0.02)
                there.sendall(sent[at : at + step])
                at += step
            await asyncio.wait_for(reading, 10)
            assert bytes(place) == sent
            there.sendall(b"x")
            assert await asyncio.wait_for(stream.read(1), 10) == b"x"

    asyncio.run(work())


def test_a_reader_goes_on_in_the_turn_of_the_loop_in_which_its_bytes_came():
    """Another turn would cost each request some four microseconds on each side."""

    async def work():
        async with connected() as (stream, there):
            order = []

            async def read():
                order.append(await stream.read(1))

            reading = asyncio.create_task(read())
            await asyncio.sleep(0)

            def become_readable():
                there.sendall(b"x")
                stream._on_readable()
                order.append("after")

            asyncio.get_running_loop().call_soon(become_readable)
            await reading
            return order

    assert asyncio.run(work()) == [b"x", "after"]


@pytest.mark.parametrize("ends", ["closed", "cancelled", "peer"])
def test_a_reader_whose_stream_ends_is_told_by_whoever_ends_it(ends):
    """Also by a task, inside which no other can go on."""

    async def work():
        async with connected() as (stream, there):
            reading = asyncio.create_task(stream.read(1))
            await asyncio.sleep(0)
            if ends == "closed":
                stream.close()
            elif ends == "cancelled":
                reading.cancel()
            else:
                there.close()
            expected = asyncio.CancelledError if ends == "cancelled" else ConnectionError
            with pytest.raises(expected):
                await asyncio.wait_for(asyncio.shield(reading), 10)
            assert stream.closed

    asyncio.run(work())


def test_work_ends_with_its_connection_and_no_other_way():
    async def wait_on(stream, seconds=10):
        with WhileOpen(stream, "peer"):
            await asyncio.sleep(seconds)

    async def work():
        async with connected() as (stream, there):
            await wait_on(stream, 0)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(wait_on(stream), 0.01)
            there.close()
            with pytest.raises(CommClosedError, match="peer: the peer has closed it"):
                await wait_on(stream)
            with WhileOpen(stream, "peer"):
                pass  # what needs no wait is done all the same, and cancels nothing afterwards
            await asyncio.sleep(0.01)

    asyncio.run(work())
