"""The memory that processes of this machine may use: all of it, or what their control group
allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_MEMORY = Path("/proc/meminfo")
_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Memory of this machine."""

    total: int
    """Bytes that the machine has."""
    limit: int | None
    """Bytes that the control group of this process, such as a container's, may use where that is
    less; else None."""

    @property
    def usable(self) -> int:
        """Bytes that processes here may use together."""
        if self.limit is None:
            return self.total
        return self.limit


def machine_memory() -> MachineMemory | None:
    """Return the memory of this machine; None where the system does not tell, as without Linux."""
    try:
        total = _total(_MEMORY.read_text())
    except OSError:
        return None
    limits = [limit for limit in _limits(_GROUPS, _OWN_GROUPS) if limit < total]
    return MachineMemory(total, min(limits, default=None))


def _total(text: str) -> int:
    """Return the bytes of ``MemTotal:   24000000 kB``."""
    line = next(line for line in text.splitlines() if line.startswith("MemTotal:"))
    return int(line.split()[1]) * 1024


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Yield the limit of each control group that this process is in."""
    files = [groups / "memory.max", groups / "memory" / "memory.limit_in_bytes"]
    lines = []
    if own.is_file():
        lines = own.read_text().splitlines()
    for line in lines:
        number, _, path = line.split(":", 2)
        folder = PurePosixPath(path.lstrip("/"))
        if ".." in folder.parts:  # the group of a process outside of this namespace
            continue
        while number == "0" and folder.name:
            files.append(groups / folder / "memory.max")
            folder = folder.parent
    for file in files:
        text = "max"
        if file.is_file():
            text = file.read_text().strip()
        if text.isdecimal():
            yield int(text)
