"""How many bytes pass through the scheduler and the client, read from the kernel's own counters of each connection."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tornado.ioloop import PeriodicCallback

if TYPE_CHECKING:
    from distributed import Scheduler

_BYTES_ACKED = 120  # offset in struct tcp_info of tcpi_bytes_acked; tcpi_bytes_received follows (linux/tcp.h)
_EVERY_MS = 250.0  # a connection that closes loses what it carried since the last look


class TrafficMeter:
    """Sums what every connection of a scheduler has carried; the client's are all among them, save those to workers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._total = 0
        self._supported = hasattr(socket, "TCP_INFO")
        self._look(count=False)
        self._timer = PeriodicCallback(self._look, _EVERY_MS)
        self._timer.start()

    def total(self) -> int | None:
        self._look()
        return self._total if self._supported else None

    def _look(self, count: bool = True) -> None:
        if not self._supported:
            return
        for comm in self._comms():
            total = carried(comm)
            if total is not None:
                self._total += (total - self._seen.get(comm, 0)) if count else 0
                self._seen[comm] = total

    def _comms(self) -> Iterable[Any]:
        yield from self._scheduler._comms  # connections that others opened to the scheduler
        for comms in (*self._scheduler.rpc.available.values(), *self._scheduler.rpc.occupied.values()):
            yield from comms


def carried(comm: Any) -> int | None:
    """Bytes over a connection so far, both ways; None where they cannot be counted."""
    stream = getattr(comm, "stream", None)
    if stream is None or stream.closed():
        return None
    info = stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 16)
    if len(info) < _BYTES_ACKED + 16:
        return None
    acked, received = struct.unpack_from("QQ", info, _BYTES_ACKED)
    return int(acked + received)
