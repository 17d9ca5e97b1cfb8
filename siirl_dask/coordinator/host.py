"""Facts about the host that a worker runs on: its memory, and which processes can share it."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path


@cache
def shared_memory_domain() -> str:
    """Processes for which this is the same can map each other's memory; empty where the system has
    no memfds.

    A segment is mapped through /proc/<pid>/fd, so both must see the same kernel (boot id), number
    processes alike (pid namespace) and run as the same user.
    """
    if not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


@cache
def physical_memory() -> int:
    """Bytes of memory of this machine: the bound on what a peer can make this process allocate
    or read at once.
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
