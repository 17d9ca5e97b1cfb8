"""Ends collectives of a stopped run in which a peer stands still.

Groups of devices are aborted: a kernel of nccl then returns, and with it the thread that waits for
its device. gloo frees a thread from such a peer by nothing but its timeout, which is an hour at
least: ``abort()`` and ``shutdown()`` of its groups do nothing (torch 2.13). Their connections are
shut down, which wakes the thread at once, with an error.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from siirl_dask import collectives

_EPOLL = "anon_inode:[eventpoll]"
_FILES = Path("/proc/self/fd")
_DETAILS = Path("/proc/self/fdinfo")


def epoll_descriptors() -> set[int]:
    """Return the file descriptors of this process that are epoll instances; none where there is no
    Linux.

    Each gloo group has one of its own: those that are new after the groups were made are theirs.
    """
    return {number for number in _numbers() if _target(number) == _EPOLL}


def end_collectives(epolls: Collection[int]) -> None:
    """End every collective of this process: on devices, and of gloo over the connections that
    ``epolls`` watch.
    """
    try:
        collectives.abort_device_groups()
    finally:
        shut_down_connections(epolls)


def end_in_thread(
    epolls: Collection[int], if_inside: Callable[[Callable[[], object]], None]
) -> None:
    """Begin ``end_collectives`` where ``if_inside`` calls it, in a thread: nccl takes a while to
    abort.
    """
    end = partial(if_inside, partial(end_collectives, epolls))
    threading.Thread(target=end, name="end-collectives", daemon=True).start()


def shut_down_connections(epolls: Collection[int]) -> int:
    """Shut down each TCP connection that one of the epoll instances watches, and return their
    number.
    """
    return sum(_shut_down(number) for epoll in epolls for number in _watched(epoll))


def _numbers() -> list[int]:
    try:
        return [int(file.name) for file in _FILES.iterdir()]
    except OSError:
        return []


def _target(number: int) -> str:
    try:
        return str((_FILES / str(number)).readlink())
    except OSError:  # it has been closed since
        return ""


def _watched(epoll: int) -> list[int]:
    """Return the file descriptors that an epoll instance watches."""
    try:
        details = (_DETAILS / str(epoll)).read_text()
    except OSError:
        return []
    return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", details, re.MULTILINE)]


def _shut_down(number: int) -> bool:
    """Shut down a TCP connection; return whether the file descriptor is one."""
    if not _target(number).startswith("socket:"):
        return False
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if (
            connection.family not in (socket.AF_INET, socket.AF_INET6)
            or not connection.getpeername()
        ):
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
