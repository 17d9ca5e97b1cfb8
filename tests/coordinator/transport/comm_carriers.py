"""Carriers over comms that tests share: workers "a" and "b" in one process, without a cluster."""

import asyncio
import struct
from contextlib import asynccontextmanager

import msgpack
from distributed.security import Security
from hypothesis import strategies as st

from siirl_dask.comms import wire
from siirl_dask.comms.access import NetworkAccess
from siirl_dask.comms.proofs import NONCE_BYTES, Side, new_secret, proof_of
from siirl_dask.comms.sockets import Scheme
from siirl_dask.coordinator.transport.carriers import HostCarrier, NetworkCarrier, socket_name
from siirl_dask.coordinator.transport.messages import Reply
from siirl_dask.testing.carriers import RUN

SECRET = new_secret()
NONCE = bytes(range(NONCE_BYTES))
MEMBERS = {"a": "tcp://127.0.0.1:1", "b": "tcp://127.0.0.1:2"}
NAME_OF_B = socket_name(RUN, "b", MEMBERS["b"])
SECURITY = Security.temporary()
TCP = NetworkAccess(scheme=Scheme.TCP, host="127.0.0.1")
UCXX = NetworkAccess(scheme=Scheme.UCXX, host="127.0.0.1")
TLS = NetworkAccess(
    scheme=Scheme.TLS,
    host="127.0.0.1",
    listens_with=SECURITY.get_listen_args("worker"),
    connects_with=SECURITY.get_connection_args("worker"),
)


def greeting(head):
    """A message of a handshake, as bytes."""
    return b"".join(wire.pack(wire.GREETING, head))


HELLO = greeting({"siirl_dask.wire": wire.VERSION, "siirl_dask.nonce": NONCE})
"""The first message of one side of a connection."""


async def next_head(reader):
    """The head of the next message of a handshake."""
    prelude = wire.read_prelude(await reader.readexactly(wire.PRELUDE.size), wire.HANDSHAKE)
    return wire.read_message(prelude, await reader.readexactly(prelude.top), []).head


async def introduce(reader, writer, side=Side.ASKS, secret=SECRET):
    """Speak as one side of a connection whose other side is a member, until both have said who
    they are.
    """
    writer.write(HELLO)
    theirs = (await next_head(reader))["siirl_dask.nonce"]
    nonces = (NONCE, theirs) if side is Side.ASKS else (theirs, NONCE)
    if side is Side.ANSWERS:
        assert await next_head(reader) == proof_of(secret, Side.ASKS, *nonces)
    writer.write(greeting(proof_of(secret, side, *nonces)))
    if side is Side.ASKS:
        assert await next_head(reader) == proof_of(secret, Side.ANSWERS, *nonces)


async def links(port, count=1):
    """Connections to a listener that both sides have introduced."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    for reader, writer in opened:
        await introduce(reader, writer)
    return opened


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


async def fine(request):
    return Reply({"fine": 1})


async def nobody(request):
    raise AssertionError("nobody asks a")


@asynccontextmanager
async def on_host(handler):
    """Workers of one host; "b" answers with ``handler``."""
    here = HostCarrier(RUN, "a", MEMBERS, nobody, timeout=5, secret=SECRET)
    there = HostCarrier(RUN, "b", MEMBERS, handler, timeout=5, secret=SECRET)
    await here.start()
    await there.start()
    try:
        yield here, there.close
    finally:
        await here.close()
        await there.close()


@asynccontextmanager
async def between_hosts(handler, network=TCP):
    """Workers that reach each other over ``network``, and the port of "b", which answers with
    ``handler``.
    """
    carriers = [
        NetworkCarrier(RUN, MEMBERS, handler, network, timeout=5, secret=SECRET) for _ in MEMBERS
    ]
    try:
        ports = dict(zip(MEMBERS, [await each.start() for each in carriers], strict=True))
        for each in carriers:
            each.meet(ports)
        yield *carriers, ports["b"]
    finally:
        for each in carriers:
            await each.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def peer_that(speaks):
    """A worker's carrier, whose peer "b" is ``speaks(reader, writer)``."""
    server = await asyncio.start_server(speaks, "127.0.0.1")
    async with between_hosts(fine) as (here, *_):
        here.meet({"b": server.sockets[0].getsockname()[1]})
        try:
            yield here
        finally:
            server.close()
