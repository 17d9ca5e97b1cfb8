import asyncio
from contextlib import asynccontextmanager

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.coordinator.transport.heads import LENGTH
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.coordinator.transport.stream_server import StreamServer
from siirl_dask.coordinator.transport.streams import FETCHES, RowStreams
from siirl_dask.errors import PeerError
from siirl_dask.testing.carriers import KEY, RUN, CarrierTests

HOSTS = {"b": "127.0.0.1"}


class Introduction:
    """The other carrier: it tells where the streams are, and carries what does not go over them."""

    def __init__(self, place):
        self.place = place
        self.asked = []

    async def reaches(self, worker):
        return True

    async def ask(self, worker, request):
        self.asked.append(request.op)
        if request.op == Op.STREAMS:
            return Reply({"port": self.place.port, "token": self.place.token} if self.place else {})
        return Reply({"over": "the other carrier"})

    async def close(self):
        pass


class Fetching:
    """Asks everything as a fetch, so that it goes over streams."""

    def __init__(self, streams):
        self.streams = streams

    async def reaches(self, worker):
        return await self.streams.reaches(worker)

    async def ask(self, worker, request):
        return await self.streams.ask(worker, Request(Op.FETCH, request.key, request.body))


@asynccontextmanager
async def connected(handler, timeout=5):
    server = StreamServer(RUN, "127.0.0.1", handler, timeout)
    await server.start()
    streams = RowStreams(RUN, HOSTS, Introduction(server.place), timeout)
    try:
        yield streams, server
    finally:
        await streams.close()
        await server.close()


def fetch(number=0):
    return Request(Op.FETCH, KEY, {"n": number})


async def answer(request):
    number = request.body["n"]
    return Reply({"n": number}, [bytes([number % 256]) * (number * 1000), b"", bytes(number)])


class TestRowStreams(CarrierTests):
    @asynccontextmanager
    async def joined(self, handler):
        async with connected(handler) as (streams, server):
            yield Fetching(streams), server.close

    @pytest.mark.skip(reason="a stream answers its two fetches in order: sources answer each as soon as they have room")
    def test_a_slow_answer_holds_up_no_other(self):
        raise NotImplementedError


def test_fetches_at_the_same_time_share_streams_and_each_gets_its_own_rows():
    async def work():
        async with connected(answer) as (streams, server):
            for _ in range(3):
                numbers = range(40)
                replies = await asyncio.gather(*(streams.ask("b", fetch(number)) for number in numbers))
                for number, reply in zip(numbers, replies, strict=True):
                    assert reply.header == {"n": number}
                    assert [bytes(frame) for frame in reply.frames] == [
                        bytes(f) for f in (await answer(fetch(number))).frames
                    ]
            return len(server._tasks) - 1  # one accepts

    assert asyncio.run(work()) <= 40 // FETCHES


def test_what_is_no_fetch_and_what_finds_no_port_goes_over_the_other_carrier():
    async def work():
        async with connected(answer) as (streams, server):
            assert (await streams.ask("b", Request(Op.ACK, KEY))).header == {"over": "the other carrier"}
            place = server.place
        for gone in (place, None):
            streams = RowStreams(RUN, HOSTS, Introduction(gone), 5)
            assert [(await streams.ask("b", fetch())).header for _ in range(2)] == [{"over": "the other carrier"}] * 2
            assert streams._carrier.asked.count(Op.STREAMS) == 1
            await streams.close()

    asyncio.run(work())


def test_a_fetch_that_is_given_up_gives_nobody_its_rows():
    async def work():
        held = asyncio.Event()

        async def slow(request):
            if request.body["n"] == 1:
                await held.wait()
            return await answer(request)

        async with connected(slow) as (streams, _):
            await streams.ask("b", fetch(3))
            asking = asyncio.create_task(streams.ask("b", fetch(1)))
            behind = asyncio.create_task(streams.ask("b", fetch(2)))
            await asyncio.sleep(0.1)
            asking.cancel()
            held.set()
            with pytest.raises(OSError):  # noqa: PT011  # the transport asks again
                await asyncio.wait_for(behind, 10)
            return (await asyncio.wait_for(streams.ask("b", fetch(2)), 10)).header

    assert asyncio.run(work()) == {"n": 2}


def test_streams_that_broke_while_nobody_asked_are_opened_again():
    async def work():
        async with connected(answer) as (streams, server):
            await asyncio.gather(*(streams.ask("b", fetch(number)) for number in range(10)))
            for task in [task for task in server._tasks if task.get_coro().__name__ == "_serve"]:
                task.cancel()
            await asyncio.sleep(0.1)
            with pytest.raises(OSError):  # noqa: PT011  # the transport asks again
                await asyncio.wait_for(streams.ask("b", fetch(5)), 10)
            return [(await asyncio.wait_for(streams.ask("b", fetch(n)), 10)).header["n"] for n in range(10)]

    assert asyncio.run(work()) == list(range(10))


@pytest.mark.parametrize("given_token", ["another", "none"])
def test_a_peer_without_the_token_is_not_heard(given_token):
    async def handler(request):
        raise AssertionError("a stranger was heard")

    async def work():
        async with connected(handler, timeout=0.5) as (_, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.place.port)
            packed = msgpack.packb([0, fetch().pack(), []])
            if given_token == "another":
                writer.write(bytes(32) + LENGTH.pack(len(packed)) + packed)
            said = await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return said

    assert asyncio.run(work()) == b""


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=64) | st.lists(st.integers(-1, 2**40) | st.text(max_size=3), max_size=4).map(msgpack.packb))
def test_malformed_requests_are_refused_and_the_next_is_served(sent):
    async def work():
        async with connected(answer) as (streams, server):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.place.port)
            writer.write(server.place.token + LENGTH.pack(len(sent)) + sent)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 10)
            writer.close()
            return (await streams.ask("b", fetch(2))).header

    assert asyncio.run(work()) == {"n": 2}


def test_a_refused_fetch_leaves_the_stream_to_the_next():
    async def handler(request):
        if request.body["n"]:
            raise PeerError("no such rows")
        return Reply({"n": 0})

    async def work():
        async with connected(handler) as (streams, server):
            for _ in range(3):
                with pytest.raises(PeerError, match="no such rows"):
                    await streams.ask("b", fetch(1))
                assert (await streams.ask("b", fetch(0))).header == {"n": 0}
            return len(server._tasks) - 1

    assert asyncio.run(work()) == 1
