"""Ends collectives of a stopped run in which a peer stands still.

Groups of devices are aborted: a kernel of nccl then returns, and with it the thread that waits for its device. gloo
frees a thread from such a peer by nothing but its timeout, which is an hour at least: ``abort()`` and ``shutdown()`` of
its groups do nothing (torch 2.13). Their connections are shut down, which wakes the thread at once, with an error.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from siirl_dask import collectives

_POLL = "anon_inode:[eventpoll]"
_FILES, _DETAILS = Path("/proc/self/fd"), Path("/proc/self/fdinfo")


def polls() -> set[int]:
    """Return the file descriptors of this process that are epoll instances; none where there is no Linux.

    Each gloo group has one of its own: those that came while the groups were made are theirs.
    """
    return {number for number in _numbers() if _target(number) == _POLL}


def end(those: Collection[int]) -> None:
    """End every collective of this process: those of devices, and those of gloo over the connections of ``cut``."""
    try:
        collectives.abort_device_groups()
    finally:
        cut(those)


def cut(those: Collection[int]) -> int:
    """Shut down each TCP connection that one of ``those`` epoll instances watches, and return their number."""
    return sum(_shut_down(number) for poll in those for number in _watched(poll))


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


def _watched(poll: int) -> list[int]:
    """Return the file descriptors that an epoll instance watches."""
    try:
        details = (_DETAILS / str(poll)).read_text()
    except OSError:
        return []
    return [int(number) for number in re.findall(r"^tfd:\s*(\d+)", details, re.MULTILINE)]


def _shut_down(number: int) -> bool:
    """Shut down a TCP connection; return whether the file descriptor is one."""
    if not _target(number).startswith("socket:"):
        return False
    with suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or not connection.getpeername():
            return False
        connection.shutdown(socket.SHUT_RDWR)
        return True
    return False
