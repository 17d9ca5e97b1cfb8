"""Whoever reaches a worker's listener, or answers in a peer's place, runs no code there and
takes no memory.
"""

import asyncio
import os
import resource
import struct
from contextlib import asynccontextmanager, suppress

import msgpack
import pytest
from distributed import Scheduler, Worker
from distributed.comm import connect, listen
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.serialize import ToPickle
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.comms import wire
from siirl_dask.comms.access import NetworkAccess
from siirl_dask.comms.proofs import Side, new_secret, proof_of
from siirl_dask.coordinator.transport.carriers import NetworkCarrier
from siirl_dask.coordinator.transport.messages import Op, Reply, Request
from siirl_dask.errors import ConfigError, PeerError
from siirl_dask.testing.carriers import KEY, RUN
from tests.coordinator.transport.comm_carriers import (
    HELLO,
    MALFORMED,
    MEMBERS,
    NONCE,
    SECRET,
    TCP,
    between_hosts,
    fine,
    greeting,
    introduce,
    links,
    next_head,
    peer_that,
)

ASKED = Request(Op.STORE, KEY)


class Command:
    """Runs a command where it is unpickled."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.fixture
def pickle(tmp_path):
    """A pickle that makes the file ``ran`` when it is unpickled."""
    return ToPickle(Command(f"touch {tmp_path}/ran"))


@asynccontextmanager
async def asker_of(answer):
    """A worker's carrier; ``answer(reader, writer)`` speaks in the place of its peer "b", once both
    have said who they are.
    """

    async def greet(reader, writer):
        await introduce(reader, writer, Side.ANSWERS)
        await answer(reader, writer)

    async with peer_that(greet) as here:
        yield here


def test_a_handshake_that_dask_would_unpickle_runs_nothing_in_the_asker(pickle, tmp_path):
    async def speak(comm):
        raise AssertionError("no handshake was made")

    async def work():
        info = {"python": pickle}
        async with (
            listen("tcp://127.0.0.1:0", speak) as listener,
            between_hosts(fine) as (here, *_),
        ):
            greet = listener.on_connection
            listener.on_connection = lambda comm: greet(comm, handshake_overrides=info)
            here.meet({"b": listener.get_host_port()[1]})
            with pytest.raises(OSError, match="no handshake of the format"):
                await asyncio.wait_for(here.ask("b", ASKED), 20)

    asyncio.run(work())
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("framed", [True, False], ids=["in our frames", "in Dask's"])
def test_a_reply_that_dask_would_unpickle_runs_nothing_in_the_asker(pickle, tmp_path, framed):
    ran = tmp_path / "ran"

    async def work():
        frames = [bytes(frame) for frame in await to_frames({"header": pickle, "payload": None})]
        await from_frames(frames)
        assert ran.exists()
        ran.unlink()
        body = b"".join(frames)

        async def reply(reader, writer):
            await reader.readexactly(wire.PRELUDE.size)
            if framed:
                writer.write(message(b"\x92\x01\x80", [len(body)], body))
            else:
                writer.write(struct.pack(f"<{len(frames) + 1}Q", len(frames), *map(len, frames)))
                writer.write(body)
            await writer.drain()
            writer.close()

        async with asker_of(reply) as here:
            asking = asyncio.wait_for(here.ask("b", ASKED), 20)
            if framed:
                assert bytes((await asking).frames[0]) == body
            else:
                with pytest.raises((PeerError, OSError)):
                    await asking

    asyncio.run(work())
    assert not ran.exists()


def test_a_request_that_dask_would_unpickle_runs_nothing_in_the_listener(pickle, tmp_path):
    async def work():
        async with between_hosts(fine) as (here, _, port):
            with suppress(Exception):  # Dask makes nothing of our handshake, and of that one error
                overrides = {"python": pickle}
                await asyncio.wait_for(
                    connect(f"tcp://127.0.0.1:{port}", handshake_overrides=overrides), 5
                )
            return (await here.ask("b", ASKED)).header

    assert asyncio.run(work()) == {"fine": 1}
    assert not (tmp_path / "ran").exists()


def test_a_connection_of_another_run_is_closed():
    async def work():
        async with between_hosts(fine) as (*_, port):
            other = NetworkCarrier(RUN, MEMBERS, fine, TCP, timeout=60, secret=new_secret())
            other.meet({"b": port})
            with pytest.raises(OSError, match="no connection of this run"):
                await asyncio.wait_for(other.ask("b", ASKED), 20)
            await other.close()

    asyncio.run(work())


def test_whoever_does_not_know_the_secret_is_sent_nothing_that_is_made_with_it():
    """Nor is a proof good for another connection, or for the other side of its own."""

    async def record(reader, writer):
        writer.write(HELLO)
        theirs = (await next_head(reader))["siirl_dask.nonce"]
        shown.append(await next_head(reader))
        assert shown[0] == proof_of(SECRET, Side.ASKS, theirs, NONCE)
        writer.write(greeting(shown[0]))  # it proves nothing of the side that answers
        assert await reader.read() == b""
        writer.close()

    async def stranger(port, proof_from):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HELLO)
        nonce = (await next_head(reader))["siirl_dask.nonce"]
        writer.write(greeting(proof_from(nonce)) + message_of(ASKED))
        heard = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        return heard

    async def asked(request):
        raise AssertionError("a stranger was heard")

    shown = []

    async def work():
        async with between_hosts(asked) as (here, _, port):
            server = await asyncio.start_server(record, "127.0.0.1")
            here.meet({"b": server.sockets[0].getsockname()[1]})
            with pytest.raises(OSError, match="no connection of this run"):
                await asyncio.wait_for(here.ask("b", ASKED), 20)
            server.close()
            proofs = [
                lambda nonce: bytes(32),
                lambda nonce: shown[0],
                lambda nonce: nonce,
                lambda nonce: proof_of(SECRET, Side.ANSWERS, NONCE, nonce),
                lambda nonce: proof_of(b"", Side.ASKS, NONCE, nonce),
                lambda nonce: [1],
            ]
            return [await stranger(port, proof) for proof in proofs]

    heard = asyncio.run(work())
    assert set(heard) <= {b"", greeting("refused")}


def message_of(request):
    return b"".join(wire.pack(0, request.pack()))


async def read_what_comes(port, sent, *, introduced=True):
    """Send bytes to a listener, as a member or as a stranger, and return what it answers until it
    closes.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError):
        if introduced:
            await introduce(reader, writer)
        writer.write(sent)
        writer.write_eof()
        return await asyncio.wait_for(reader.read(), 10)
    return b""


def test_any_bytes_are_refused_and_the_next_request_is_served():
    async def work():
        async with between_hosts(fine) as (here, _, port):
            loop = asyncio.get_running_loop()

            @settings(max_examples=150, deadline=None)
            @given(MALFORMED, st.booleans())
            def attack(sent, introduced):
                asyncio.run_coroutine_threadsafe(
                    read_what_comes(port, sent, introduced=introduced), loop
                ).result(30)
                assert asyncio.run_coroutine_threadsafe(here.ask("b", ASKED), loop).result(
                    30
                ).header == {"fine": 1}

            await asyncio.to_thread(attack)

    asyncio.run(work())


def test_any_answer_is_refused_by_name_or_is_a_reply():
    async def work():
        sent = []

        async def answer(reader, writer):
            with suppress(OSError, asyncio.IncompleteReadError):
                await reader.read(1)
                writer.write(sent[-1])
                writer.close()

        async with asker_of(answer) as here:
            loop = asyncio.get_running_loop()

            async def ask():
                try:
                    return await asyncio.wait_for(here.ask("b", ASKED), 20)
                except (PeerError, ConnectionError, OSError) as refusal:
                    return refusal

            @settings(max_examples=150, deadline=None)
            @given(MALFORMED)
            def attack(message):
                sent.append(message)
                got = asyncio.run_coroutine_threadsafe(ask(), loop).result(30)
                assert isinstance(got, Reply | PeerError | OSError)
                assert not isinstance(got, TimeoutError)

            await asyncio.to_thread(attack)

    asyncio.run(work())


def message(head, sizes=(), body=b""):
    return struct.pack(f"<IIQ{len(sizes)}Q", len(head), len(sizes), 0, *sizes) + head + body


def nested(depth):
    return b"\x91" * depth + b"\x90"


def empty_dicts(nbytes):
    return b"\x92\x00\xdd" + struct.pack(">I", nbytes) + b"\x80" * nbytes


BOMBS = {
    "a head beyond the bound": (struct.pack("<IIQ", 2**32 - 1, 0, 0), "a head of 4294967295 bytes"),
    "frames beyond the bound": (struct.pack("<IIQ", 0, 2**32 - 1, 0), "4294967295 frames"),
    "bytes beyond the bound": (message(b"", [2**62, 2**62]), "bytes together: expected at most"),
    "lists within lists": (message(nested(2**15)), "no message"),
    "lists as deep as msgpack goes": (
        message(b"\x92\x00" + nested(500)),
        "within values more than 32 times",
    ),
    "an extension type": (
        message(msgpack.packb([0, msgpack.ExtType(7, b"x")])),
        "extension type 7",
    ),
    "a time": (message(msgpack.packb([0, msgpack.Timestamp(1)])), "type Timestamp"),
    "a frame that is not there": (
        message(msgpack.packb([0, msgpack.ExtType(1, b"\1\0\0\0")])),
        "no message",
    ),
    "a frame that is many values": (
        message(msgpack.packb([0, [msgpack.ExtType(1, bytes(4))] * 9]), [1], b"x"),
        "two values that are frame 0",
    ),
    "a frame of the message's own that is a value": (
        message(msgpack.packb([1, msgpack.ExtType(1, bytes(4))]), [1], b"x"),
        "no message",
    ),
    "a frame that nothing refers to": (message(msgpack.packb([0, 1]), [1], b"x"), "no message"),
    "keys of lists": (message(b"\x92\x00\x81\x90\x01"), "no message"),
    "a pickle by Dask's name": (
        message(msgpack.packb([1, {"__Pickled__": 1}]), [1], b"x"),
        "no request",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs_are_refused_by_name(bomb, caplog):
    sent, said = BOMBS[bomb]

    async def work():
        async with between_hosts(fine) as (here, _, port):
            answer = await read_what_comes(port, sent)
            assert (await here.ask("b", ASKED)).header == {"fine": 1}
            return answer

    answer = asyncio.run(work())
    assert said in caplog.text + answer.decode("latin1")


def test_a_head_of_nothing_but_empty_mappings_takes_bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def work():
        async with between_hosts(fine) as (here, _, port):
            for _ in range(5):
                await read_what_comes(port, message(empty_dicts(wire.MAX_REQUEST_HEAD - 64)))
            assert (await here.ask("b", ASKED)).header == {"fine": 1}

    asyncio.run(work())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


def test_frames_that_are_announced_and_never_come_take_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    async def work():
        async with between_hosts(fine) as (here, _, port):
            opened = await links(port, 20)
            for _, writer in opened:
                writer.write(message(b"", [wire.MAX_REQUEST_FRAMES]))
                await writer.drain()
            assert (await here.ask("b", ASKED)).header == {"fine": 1}
            for _, writer in opened:
                writer.close()

    asyncio.run(work())
    # KiB; all would be 1.3 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_more_rows_than_were_asked_for_are_refused_before_they_come():
    async def boast(reader, writer):
        await reader.readexactly(wire.PRELUDE.size)
        writer.write(message(b"", [2**40]))

    async def work():
        async with asker_of(boast) as here:
            await here.ask("b", ASKED)

    with pytest.raises(PeerError, match=f"frames of {2**40} bytes together: expected at most"):
        asyncio.run(work())


def test_a_cluster_whose_comms_have_no_hosts_is_refused_by_name():
    async def work():
        async with (
            Scheduler(protocol="inproc", dashboard_address="127.0.0.1:0") as scheduler,
            Worker(scheduler.address, name="a") as worker,
        ):
            NetworkAccess.of(worker)

    with pytest.raises(ConfigError, match=r"worker 'a' is at inproc://.*protocol tcp, tls or ucx"):
        asyncio.run(work())
