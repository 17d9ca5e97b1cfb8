"""Carries requests between processes of one host, over Unix sockets: a sixth of the time of a message over tcp.

What shared memory moves in a few milliseconds, the words about it must not double. Sockets have abstract names (Linux):
nothing is left in any folder when a process is killed, and only processes of the same user are answered.

A message is the length of its head (4 bytes, little-endian), the head (msgpack) and its frames. Requests and replies
carry a number, so that many can be under way on one connection and a late answer to a request that was given up finds
nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import count
from typing import Any

import msgpack

from siirl_dask.coordinator.arena import shared_memory_domain
from siirl_dask.coordinator.frames import Frame
from siirl_dask.coordinator.limits import physical_memory
from siirl_dask.coordinator.messages import Handler, Reply, Request, read_request
from siirl_dask.errors import Aborted, PeerError, SiirlError

logger = logging.getLogger("siirl_dask.coordinator")
_MOST_HEAD_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of struct ucred (unix(7))


class LocalLinks:
    """One worker's listener, and its connections to peers of this host. {name: address} are the run's ``members``."""

    def __init__(self, run: str, worker: str, members: Mapping[str, str], handler: Handler) -> None:
        self._run = run
        self._worker = worker
        self._members = members
        self._handler = handler
        self._links: dict[str, asyncio.Task[_Link | None]] = {}
        self._served: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        if shared_memory_domain():
            self._server = await asyncio.start_unix_server(self._accept, path=self._name(self._worker))

    async def reaches(self, worker: str) -> bool:
        return bool(shared_memory_domain()) and await self._link(worker) is not None

    async def ask(self, worker: str, request: Request) -> Reply:
        link = await self._link(worker)
        if link is None:
            raise ConnectionError("it is not on this host")
        return await link.ask(request)

    async def _link(self, worker: str) -> _Link | None:
        if worker not in self._links:
            self._links[worker] = asyncio.create_task(_connect(self._name(worker)))
        connecting = self._links[worker]
        return connecting.result() if connecting.done() else await asyncio.shield(connecting)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for served in self._served:
            served.cancel()
        for connecting in self._links.values():
            if connecting.done() and (link := connecting.result()) is not None:
                link.close()
            connecting.cancel()

    def _name(self, worker: str) -> str:
        return "\0siirl-" + sha256(f"{self._run} {worker} {self._members[worker]}".encode()).hexdigest()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers: set[asyncio.Task[None]] = set()
        try:
            _check_user(writer)
            while True:
                number, packed, _ = await _read(reader)
                answer = asyncio.create_task(self._answer(writer, number, packed))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
        except (OSError, EOFError):
            pass  # the peer has closed
        except PeerError as error:
            logger.warning("closed a link of run %s: %s", self._run, error)
        finally:
            for answer in answers:
                answer.cancel()
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, number: int, packed: object) -> None:
        try:
            reply = await self._handler(read_request(self._run, packed))
            head: Any = reply.header
        except Aborted:
            writer.close()  # the peer is being aborted as well
            return
        except SiirlError as error:
            head, reply = str(error), Reply()
        except Exception:
            logger.exception("a request of run %s failed", self._run)
            head, reply = "it failed on a bug: see the worker's log", Reply()
        if not writer.is_closing():
            _write(writer, number, head, reply.frames)


class _Link:
    """A connection to one peer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._lost: Exception | None = None
        self._task = asyncio.create_task(self._listen(reader))

    async def ask(self, request: Request) -> Reply:
        if self._lost is not None:
            raise ConnectionError(str(self._lost))
        number = next(self._numbers)
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            _write(self._writer, number, request.pack(), ())
            return await answer
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        self._task.cancel()
        self._writer.close()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, head, frames = await _read(reader)
                answer = self._waiting.get(number)
                if answer is not None and not answer.done():
                    if isinstance(head, dict):
                        answer.set_result(Reply(head, frames))
                    else:
                        answer.set_exception(PeerError(str(head)))
        except (OSError, EOFError, PeerError) as error:
            self._lost = error
        finally:
            self._lost = self._lost or ConnectionError("the link was closed")
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"the connection was closed: {self._lost}"))
            self._writer.close()


async def _connect(name: str) -> _Link | None:
    try:
        reader, writer = await asyncio.open_unix_connection(name)
        _check_user(writer)
    except (OSError, PeerError):
        return None
    return _Link(reader, writer)


def _check_user(writer: asyncio.StreamWriter) -> None:
    """PeerError unless the process on the other side is of this user."""
    found = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    if uid != os.getuid():
        raise PeerError(f"process {pid} of user {uid} was refused")


def _write(writer: asyncio.StreamWriter, number: int, head: object, frames: Sequence[Frame]) -> None:
    views = [memoryview(frame).cast("B") for frame in frames]
    packed = msgpack.packb([number, head, [view.nbytes for view in views]])
    writer.writelines([_LENGTH.pack(len(packed)), packed, *views])


async def _read(reader: asyncio.StreamReader) -> tuple[int, object, list[bytes]]:
    """Number, head and frames of a message. PeerError for what is none, EOFError where there is no more."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > _MOST_HEAD_BYTES:
        raise PeerError(f"received the head of a message of {length} bytes: expected at most {_MOST_HEAD_BYTES}")
    packed = await reader.readexactly(length)
    try:
        number, head, sizes = msgpack.unpackb(packed, strict_map_key=False)
        valid = isinstance(number, int) and all(isinstance(size, int) and size >= 0 for size in sizes)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise PeerError(f"received what is no message: {error!r}") from error
    if not valid or sum(sizes) > physical_memory():
        raise PeerError(f"received frames of {str(sizes)[:80]} bytes: more than this machine's memory")
    return number, head, [await reader.readexactly(size) for size in sizes]
