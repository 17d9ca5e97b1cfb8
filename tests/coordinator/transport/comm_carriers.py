"""Carriers over comms that tests share: workers "a" and "b" in one process, without a cluster."""

import asyncio
import struct
from contextlib import asynccontextmanager

import msgpack
from distributed.security import Security
from hypothesis import strategies as st

from siirl_dask.comms import wire
from siirl_dask.comms.sockets import Scheme
from siirl_dask.coordinator.transport.carriers import (
    HostCarrier,
    NetworkAccess,
    NetworkCarrier,
    digest_of,
    socket_name,
)
from siirl_dask.testing.carriers import RUN

MEMBERS = {"a": "tcp://127.0.0.1:1", "b": "tcp://127.0.0.1:2"}
NAME_OF_B = socket_name(RUN, "b", MEMBERS["b"])
SECURITY = Security.temporary()
TCP = NetworkAccess(scheme=Scheme.TCP, host="127.0.0.1")
TLS = NetworkAccess(
    scheme=Scheme.TLS,
    host="127.0.0.1",
    listens_with=SECURITY.get_listen_args("worker"),
    connects_with=SECURITY.get_connection_args("worker"),
)


def hello(side):
    """The handshake of one side of a connection of RUN, as bytes."""
    info = {"siirl_dask.wire": wire.VERSION, "siirl_dask.run": digest_of(RUN, side)}
    return b"".join(wire.pack(wire.GREETING, info))


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


async def nobody(request):
    raise AssertionError("nobody asks a")


@asynccontextmanager
async def on_host(handler):
    """Workers of one host; "b" answers with ``handler``."""
    here = HostCarrier(RUN, "a", MEMBERS, nobody, timeout=5)
    there = HostCarrier(RUN, "b", MEMBERS, handler, timeout=5)
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
    carriers = [NetworkCarrier(RUN, MEMBERS, handler, network, timeout=5) for _ in MEMBERS]
    try:
        ports = dict(zip(MEMBERS, [await each.start() for each in carriers], strict=True))
        for each in carriers:
            each.meet(ports)
        yield *carriers, ports["b"]
    finally:
        for each in carriers:
            await each.close()
        await asyncio.sleep(0)
