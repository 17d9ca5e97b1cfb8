"""Says which process a start of a run is, and whether that process is certainly gone."""

from __future__ import annotations

import getpass
import json
import os
import socket
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The process that started an attempt."""

    host: str
    pid: int
    user: str
    started: str
    """Time in UTC, for people."""
    lease: float
    """Seconds without a sign of life after which another start may take the folder."""
    token: str
    """Unique, so that a start whose reply from the store was lost finds out that it had won."""
    machine: str = ""
    """The running system and namespace in which ``pid`` counts; empty where they cannot be told."""
    birth: str = ""
    """Time at which the process began, as the kernel counts: a later process may have the same
    ``pid``."""

    @staticmethod
    def here(lease: float) -> Owner:
        """Describe this process."""
        pid = os.getpid()
        return Owner(
            host=socket.gethostname(),
            pid=pid,
            user=_user(),
            started=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            lease=lease,
            token=uuid4().hex,
            machine=_machine(),
            birth=_birth(pid) or "",
        )

    def is_gone(self) -> bool:
        """Return whether the process has certainly ended: it was one of this system, and is no
        more.
        """
        return self._runs() is False

    def is_there(self) -> bool:
        """Return whether the process is certainly there: it is one of this system."""
        return self._runs() is True

    def _runs(self) -> bool | None:
        """Return whether the process runs; None where this system cannot tell."""
        if not self.machine or self.machine != _machine():
            return None
        return is_same(self.birth, _birth(self.pid))

    def to_json(self) -> bytes:
        """Return the content of an attempt's file."""
        return (json.dumps(asdict(self), indent=1) + "\n").encode()

    @staticmethod
    def from_json(data: bytes) -> Owner:
        """Read what ``to_json`` wrote. ValueError or TypeError for anything else."""
        document = json.loads(data)
        if not isinstance(document, dict):
            raise ValueError(f"expected an object, got {document!r:.100}")
        owner = Owner(
            **{name.name: document[name.name] for name in fields(Owner) if name.name in document}
        )
        texts = (
            owner.host,
            owner.user,
            owner.started,
            owner.token,
            owner.machine,
            owner.birth,
        )
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise ValueError("host, user, started, token, machine and birth are not all texts")
        if (
            type(owner.pid) is not int
            or not isinstance(owner.lease, (int, float))
            or not 0 < owner.lease <= 86400
        ):
            raise ValueError(
                f"pid={owner.pid!r} and lease={owner.lease!r}: expected a number, and seconds up "
                "to a day"
            )
        return owner

    def __str__(self) -> str:
        return f"process {self.pid} of {self.user} on {self.host}, since {self.started}"


def is_same(birth: str, now: str | None) -> bool | None:
    """Return whether the process that has a number ``now`` is the one that had it at ``birth``;
    None where either is hidden, as /proc hides other users' processes with ``hidepid``.

    ``now`` is None where no process has the number.
    """
    if now is None:
        return False
    if not birth or not now:
        return None
    return birth == now


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user often has no name
        return f"user {os.getuid()}"


def _machine() -> str:
    """Return the id of this boot of the system and of this process's pid namespace; empty where
    there is none.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux, or no /proc
        return ""


def _birth(pid: int) -> str | None:
    """Return the time at which process ``pid`` of this system began, empty if that is hidden;
    None if it has ended.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's
    try:
        _, _, after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
    except OSError:
        return ""
    state, *rest = after_name.split()
    if state in ("Z", "X"):
        return None
    return rest[18]  # field 22 of proc(5), the name and what is before it taken off
