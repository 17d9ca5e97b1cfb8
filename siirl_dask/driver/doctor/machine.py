"""Checks the limits of the operating system: descriptors, memory, shared memory, space for
temporary files.
"""

from __future__ import annotations

import os
import resource
import tempfile
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # Dask needs it

from siirl_dask.devices.machine_memory import machine_memory
from siirl_dask.driver.doctor.finding import DoctorFinding, fault, note, ok
from siirl_dask.errors import counted
from siirl_dask.wording import readable_bytes

_FILES = 128  # descriptors; a driver with its scheduler had 43
_FILES_OF_A_WORKER = 8  # descriptors; a driver had 4 more for each worker
_SHM = Path("/dev/shm")
_LEAST_SHM = 2**28  # NCCL and vLLM keep their buffers there; containers begin with 64 MiB
_LEAST_TEMPORARY = 2**28  # rows that spill; torch and triton keep compiled kernels there as well


def check_machine(workers: int, threads: int, spill_folder: str | None) -> list[DoctorFinding]:
    """Return findings on this machine, for a run with ``workers`` workers of ``threads`` threads
    each on it.
    """
    return [
        *check_limits(workers),
        _temporary(spill_folder or tempfile.gettempdir()),
        _memory(),
        _cores(workers, threads),
    ]


def check_limits(workers: int) -> list[DoctorFinding]:
    """Return findings on the limits of this process that workers need to be high, for a run with
    ``workers``.
    """
    return [_open_files(workers), shared_memory(_SHM)]


def _open_files(workers: int) -> DoctorFinding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES + _FILES_OF_A_WORKER * workers
    if soft == resource.RLIM_INFINITY:
        return ok("open files", "a process may open any number")
    if soft >= needed:
        return ok("open files", f"a process may open {soft}")
    text = f"a process may open {soft}, and a run with {counted(workers, 'worker')} wants {needed}"
    cure = f"raise nofile in /etc/security/limits.conf to {needed}"
    if hard == resource.RLIM_INFINITY or hard >= needed:
        cure = f"ulimit -n {needed}"
    return fault("open files", text, cure)


def shared_memory(folder: Path) -> DoctorFinding:
    """Return a finding on the space for shared memory in ``folder``."""
    if not folder.is_dir():
        return fault("shared memory", f"{folder} is not there", "mount -t tmpfs tmpfs /dev/shm")
    total, free = _space(folder)
    if free >= _LEAST_SHM:
        return ok(
            "shared memory", f"{folder} has {readable_bytes(free)} free of {readable_bytes(total)}"
        )
    return fault(
        "shared memory",
        f"{folder} has {readable_bytes(free)} free of {readable_bytes(total)}: NCCL and vLLM want "
        f"{readable_bytes(_LEAST_SHM)} at least",
        "give a container more (docker run --shm-size=16g), or delete what killed programs left "
        "there",
    )


def _temporary(folder: str) -> DoctorFinding:
    if not Path(folder).is_dir():
        return fault(
            "temporary files",
            f"{folder} is not there",
            "make the folder, or set data.spill_directory and TMPDIR",
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        cure = "give data.spill_directory, or set TMPDIR, to a folder that this user may write to"
        return fault("temporary files", f"{folder} cannot be written by user {os.getuid()}", cure)
    total, free = _space(Path(folder))
    text = f"{folder} has {readable_bytes(free)} free of {readable_bytes(total)}"
    if free >= _LEAST_TEMPORARY:
        return ok("temporary files", text)
    return fault(
        "temporary files",
        text,
        "make room, or set data.spill_directory and TMPDIR to a larger disk",
    )


def _space(folder: Path) -> tuple[int, int]:
    """Return the bytes of a file system, and those that are free for this user."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _memory() -> DoctorFinding:
    memory = psutil.virtual_memory()
    text = f"{readable_bytes(memory.available)} free of {readable_bytes(memory.total)}"
    host = machine_memory()
    if host is not None and host.limit is not None:
        return note("memory", f"{text}; this container may use {readable_bytes(host.limit)}")
    return ok("memory", text)


def _cores(workers: int, threads: int) -> DoctorFinding:
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if workers * threads > cores:
        wanted = f"{counted(workers, 'worker')} of {counted(threads, 'thread')}"
        text = f"{cores}, and a run has {wanted} (cluster.workers, cluster.threads)"
        return note(
            "cores",
            text,
            "they take turns where they compute on CPUs; on accelerators it matters little",
        )
    return ok("cores", str(cores))
