"""Measures the limits of this machine: one copy of the payload in memory, one move through a TCP
socket.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType

import numpy as np

_BUFFER = 4 * 2**20  # of the sockets: the kernel's default is made for networks, not for memory


class Limits:
    """Both limits for one size. All buffers are allocated and touched before anything is timed."""

    def __init__(self, payload: int) -> None:
        self._source = np.ones(payload, np.uint8)
        self._target = np.ones(payload, np.uint8)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            context = multiprocessing.get_context("spawn")
            self._peer: BaseProcess = context.Process(
                target=_receive, args=(port, payload), daemon=True
            )
            self._peer.start()
            self._socket, _ = server.accept()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._socket.recv(1)

    def memcpy(self) -> float:
        """Seconds to copy the payload from one warm buffer to another, in one thread."""
        return self._second_of_two(self._copy)

    def loopback(self) -> float:
        """Seconds until another process has the payload in a buffer it has used before, and has
        said so.
        """
        return self._second_of_two(self._send)

    def _second_of_two(self, action: Callable[[], None]) -> float:
        action()
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def _copy(self) -> None:
        np.copyto(self._target, self._source)

    def _send(self) -> None:
        self._socket.sendall(self._source.data)
        self._socket.recv(1)

    def __enter__(self) -> Limits:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._socket.close()
        self._peer.join()


def _receive(port: int, payload: int) -> None:
    buffer = np.ones(payload, np.uint8)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        connection.send(b"1")
        while _fill(connection, buffer.data):
            connection.send(b"1")


def _fill(connection: socket.socket, view: memoryview) -> bool:
    """False when the other side has closed."""
    while len(view):
        count = connection.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True
