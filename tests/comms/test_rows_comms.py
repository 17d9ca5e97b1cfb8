"""The comms by which rows travel, as Dask uses comms, and what they refuse."""

import asyncio
import os
import socket
import ssl
import tomllib
from pathlib import Path

import pytest
from distributed import rpc
from distributed.comm import registry
from distributed.comm.core import CommClosedError, connect, listen
from distributed.comm.registry import Backend, get_backend
from distributed.core import ConnectionPool, Server
from distributed.security import Security

from siirl_dask.comms import backends, listeners, wire
from siirl_dask.comms.sockets import Scheme
from siirl_dask.coordinator.host import shared_memory_domain
from siirl_dask.errors import PeerError
from tests.comms.ucxx_here import needs_ucxx

ROOT = Path(__file__).resolve().parents[2]
SECURITY = Security.temporary()
backends.register()
SCHEMES = [
    Scheme.TCP,
    Scheme.TLS,
    pytest.param(
        Scheme.UNIX,
        marks=pytest.mark.skipif(not shared_memory_domain(), reason="abstract sockets need Linux"),
    ),
    pytest.param(Scheme.UCXX, marks=needs_ucxx),
]


def listens_with(scheme):
    return SECURITY.get_listen_args("worker") if scheme is Scheme.TLS else {}


def connects_with(scheme):
    return SECURITY.get_connection_args("worker") if scheme is Scheme.TLS else {}


def place(scheme):
    location = f"test-{os.getpid()}" if scheme is Scheme.UNIX else "127.0.0.1:0"
    return scheme.prefix + location


async def echo(comm):
    try:
        while True:
            await comm.write(await comm.read())
    except CommClosedError:
        pass


@pytest.mark.parametrize("scheme", SCHEMES)
def test_dasks_connect_rpc_and_pool_work_on_it(scheme):
    value = {"a": [1, "b", b"c" * 5000, None, {"d": 2.5}], "e": 2**40}

    async def work():
        server = Server({"echo": lambda x: x}, connection_args=connects_with(scheme))
        async with server:
            await server.listen(place(scheme), **listens_with(scheme))
            address = server.address
            assert address.startswith(scheme.prefix)
            async with rpc(address, connection_args=connects_with(scheme)) as remote:
                assert await remote.echo(x=value) == value
            pool = await ConnectionPool(limit=2, connection_args=connects_with(scheme))
            for _ in range(3):
                assert await pool(address).echo(x=value) == value
            assert pool.open == 1
            await pool.close()
            comm = await connect(address, **connects_with(scheme))
            info = comm.extra_info
            comm.abort()
            assert comm.closed()
            return info

    info = asyncio.run(asyncio.wait_for(work(), 60))
    if scheme is Scheme.TLS:
        assert info["cipher"]
        assert info["peercert"]
    if scheme is Scheme.UNIX:
        assert info == {"pid": os.getpid(), "uid": os.getuid(), "gid": os.getgid()}


def test_an_object_is_no_plain_data():
    async def work():
        async with listen(place(Scheme.TCP), echo) as listener:
            comm = await connect(listener.contact_address)
            with pytest.raises(TypeError, match=r"rows\+tcp carries plain data only"):
                await comm.write({"op": object()})
            await comm.write({"op": 1})
            assert await comm.read() == {"op": 1}
            comm.abort()

    asyncio.run(work())


def test_both_sides_learn_what_the_other_says_in_the_handshake():
    heard = []

    async def handle(comm):
        heard.append(comm.remote_info["run"])
        comm.abort()

    async def work():
        overrides = {"run": "listens"}
        async with listen(place(Scheme.TCP), handle, handshake_overrides=overrides) as listener:
            comm = await connect(listener.contact_address, handshake_overrides={"run": "asks"})
            heard.append(comm.remote_info["run"])
            with pytest.raises(CommClosedError):
                await comm.read()

    asyncio.run(work())
    assert sorted(heard) == ["asks", "listens"]


def test_encryption_that_dask_demands_is_not_forgotten():
    async def work():
        with pytest.raises(RuntimeError, match=r"encryption required.*rows\+tls://"):
            await connect("rows+tcp://127.0.0.1:1", require_encryption=True)
        with pytest.raises(RuntimeError, match="encryption required"):
            listen("rows+tcp://127.0.0.1:0", echo, require_encryption=True)
        with pytest.raises(TypeError, match="expects certificates"):
            listen("rows+tls://127.0.0.1:0", echo)

    asyncio.run(work())


def test_a_certificate_of_another_authority_is_refused_at_once():
    stranger = Security.temporary()

    async def work():
        async with listen(place(Scheme.TLS), echo, **listens_with(Scheme.TLS)) as listener:
            with pytest.raises(CommClosedError):
                await connect(
                    listener.contact_address, timeout=60, **stranger.get_connection_args("worker")
                )
            comm = await connect(listener.contact_address, **connects_with(Scheme.TLS))
            await comm.write([1])
            assert await comm.read() == [1]
            comm.abort()

    asyncio.run(asyncio.wait_for(work(), 30))


def test_a_stranger_that_says_nothing_is_closed_and_one_that_says_too_much(monkeypatch):
    monkeypatch.setattr(listeners, "_HANDSHAKE_SECONDS", 0.2)
    monkeypatch.setattr(listeners, "_GRACE", 0.1)
    said = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 9,
        os.urandom(64),
        wire.PRELUDE.pack(2**13, 0, 0),
        wire.PRELUDE.pack(10, 1, 0),
        wire.PRELUDE.pack(2**13, 0, wire.GREETING),
        wire.PRELUDE.pack(10, 1, wire.GREETING),
        b"".join(wire.pack(0, {"siirl_dask.wire": wire.VERSION})),
        b"".join(wire.pack(wire.GREETING, [1])),
        b"".join(wire.pack(wire.GREETING, {"siirl_dask.wire": 1})),
        b"".join(wire.pack(wire.GREETING, {"siirl_dask.wire": wire.VERSION})),
    ]
    handled = []

    async def work():
        async with listen(place(Scheme.TCP), handled.append) as listener:
            for sent in said:
                reader, writer = await asyncio.open_connection(*listener.get_host_port())
                writer.write(sent)
                answer = await asyncio.wait_for(reader.read(), 20)
                assert len(answer) < 200
                writer.close()

    asyncio.run(work())
    assert handled == []


def test_a_handshake_of_another_kind_is_an_error_of_the_one_who_connects():
    async def work():
        async def answer(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        server = await asyncio.start_server(answer, "127.0.0.1")
        host, port = server.sockets[0].getsockname()[:2]
        with pytest.raises(CommClosedError, match="received"):
            await connect(f"rows+tcp://{host}:{port}")
        server.close()

    asyncio.run(asyncio.wait_for(work(), 20))


@pytest.mark.parametrize("bounds", [wire.MessageBounds(4, 2**20), wire.MessageBounds(2**10, 999)])
def test_a_message_beyond_its_bounds_closes_the_connection(bounds):
    async def large(comm):
        await comm.send({"a": 1}, [bytes(1000)])

    async def work():
        async with listen(place(Scheme.TCP), large) as listener:
            comm = await connect(listener.contact_address)
            with pytest.raises(PeerError, match="expected at most"):
                await comm.receive(bounds)
            assert comm.closed()

    asyncio.run(work())


def test_reads_and_writes_that_are_cancelled_close_the_connection():
    async def silent(comm):
        await asyncio.sleep(0.5)
        comm.abort()

    async def work():
        async with listen(place(Scheme.TCP), silent) as listener:
            for attempt in (
                lambda comm: comm.read(),
                lambda comm: comm.send(None, [bytearray(2**26)]),
            ):
                comm = await connect(listener.contact_address)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(attempt(comm), 0.05)
                assert comm.closed()
                with pytest.raises(CommClosedError):
                    await comm.write(1)

    asyncio.run(work())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_large_messages_pass_both_ways_at_once(scheme):
    """Neither waits for the other: each side sends more than the kernel holds while it receives."""
    blob = os.urandom(2**23)

    async def swap(comm):
        bounds = wire.MessageBounds(2**10, 2**24)
        _, message = await asyncio.gather(comm.send(None, [blob]), comm.receive(bounds))
        return bytes(message.frames[0]) == blob

    async def work():
        swapped = asyncio.get_running_loop().create_future()

        async def handle(comm):
            swapped.set_result(await swap(comm))

        async with listen(place(scheme), handle, **listens_with(scheme)) as listener:
            comm = await connect(listener.contact_address, **connects_with(scheme))
            assert await swap(comm)
            assert await swapped
            comm.abort()

    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_listener_that_has_stopped_takes_nobody():
    async def work():
        async with listen(place(Scheme.TCP), echo) as listener:
            host, port = listener.get_host_port()
        with pytest.raises(OSError):  # noqa: PT011
            socket.create_connection((host, port), timeout=5)

    asyncio.run(work())


def test_the_wheel_names_the_backends_where_dask_looks_for_them(tmp_path, monkeypatch):
    """Nothing is registered: Dask finds them by the metadata of an installed package alone."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"]["distributed.comm.backends"]
    assert sorted(named) == sorted(str(scheme) for scheme in Scheme)
    metadata = tmp_path / "siirl_dask-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: siirl_dask\nVersion: 1\n")
    lines = [f"{scheme} = {target}" for scheme, target in named.items()]
    (metadata / "entry_points.txt").write_text(
        "\n".join(["[distributed.comm.backends]", *lines]) + "\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for scheme in named:
        monkeypatch.delitem(registry.backends, scheme)
        backend = get_backend(scheme)
        assert isinstance(backend, Backend)
        assert backend.scheme == scheme


def test_a_handshake_that_took_too_long_has_ended_before_its_socket_is_closed(monkeypatch):
    """It watches the socket's number, which the next connection may get."""
    monkeypatch.setattr(listeners, "_HANDSHAKE_SECONDS", 0.05)
    monkeypatch.setattr(listeners, "_GRACE", 0.05)

    async def work():
        ended = asyncio.Event()

        async def greet():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        with pytest.raises(TimeoutError):
            await listeners._within_limit(greet())
        return ended.is_set()

    assert asyncio.run(work())


def test_a_long_message_over_tls_lets_others_have_their_turn(monkeypatch):
    """A call encrypts all that it is passed, and nothing else happens in this process meanwhile."""
    passed = []
    send = ssl.SSLSocket.send

    def recording(sock, data):
        passed.append(memoryview(data).nbytes)
        return send(sock, data)

    async def read(comm):
        await comm.receive(wire.MessageBounds(2**10, 2**25))

    async def work():
        monkeypatch.setattr(ssl.SSLSocket, "send", recording)
        async with listen(place(Scheme.TLS), read, **listens_with(Scheme.TLS)) as listener:
            comm = await connect(listener.contact_address, **connects_with(Scheme.TLS))
            await comm.send(None, [bytearray(2**24)])
            comm.abort()

    asyncio.run(asyncio.wait_for(work(), 60))
    assert max(passed) <= 2**22
