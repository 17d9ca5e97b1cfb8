"""A host of the lab: namespaces of its own for network, hostname, mounts, IPC and processes.

Nothing has a name outside the host (no file in /run/netns, no link on the machine): a host lives as
long as its first process, which reads a pipe that the lab's process holds and ends with it. The
kernel then kills all other processes and takes the links away. Manual pages: namespaces(7),
unshare(1), nsenter(1).
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_UNSHARE = (
    "unshare",
    "--net",
    "--uts",
    "--mount",
    "--ipc",
    "--pid",
    "--fork",
    "--kill-child=SIGKILL",
    "--mount-proc",
)
_LOOPBACK = "127.0.0.1 localhost\n::1 localhost\n"


class LabError(RuntimeError):
    """A command of the lab failed; the message has what it printed."""


@dataclass(slots=True)
class Host:
    """One host. ``address`` and ``address6`` are its IPv4 and IPv6 addresses, empty on a host
    without a link.
    """

    name: str
    pid: int
    """Process id of its first process, as the machine sees it."""
    address: str = ""
    address6: str = ""
    _first: subprocess.Popen[str] | None = None
    _entry: tuple[str, ...] = ()
    _started: list[Any] = field(default_factory=list)

    def command(self, *command: object) -> list[str]:
        """Return the command line that runs ``command`` on this host, for ``subprocess``."""
        namespaces = ("-n", "-u", "-m", "-p", "-i", f"--wdns={Path.cwd()}")
        # a shell starts background jobs, and so perhaps this process, with SIGINT ignored
        start = ("env", "--default-signal=INT")
        return [
            *self._entry,
            "nsenter",
            "-t",
            str(self.pid),
            *namespaces,
            "--",
            *start,
            *map(str, command),
        ]

    def run(self, *command: object, **options: Any) -> str:
        """Run a command to its end and return what it printed. LabError if it fails."""
        return checked(self.command(*command), **options)

    def start(self, *command: object, **options: Any) -> subprocess.Popen[Any]:
        """Start a command in the background, by ``subprocess.Popen`` with ``options``. It ends
        with the host.
        """
        process = subprocess.Popen(self.command(*command), **options)
        self.ends_with_host(process)
        return process

    def ends_with_host(self, process: Any) -> None:
        """Wait for a process on this host, one that has ``wait()``, when the host has been
        switched off.
        """
        self._started.append(process)

    def signal(self, process: Any, number: signal.Signals) -> None:
        """Send a signal to a process of this host; the one that ``Popen`` knows only waits for
        it, outside.
        """
        pids = [process.pid]
        if isinstance(process, subprocess.Popen):
            pids = _children(process.pid)
        for pid in pids:
            os.kill(pid, number)

    def crash(self) -> None:
        """Kill all processes of the host. Its kernel goes on: peers are told that its
        connections are closed.
        """
        with suppress(ProcessLookupError):
            # the first process of its namespace: the kernel kills the others
            os.kill(self.pid, signal.SIGKILL)
        if self._first is not None:
            self._first.communicate()
        for process in self._started:
            process.wait()


def start_host(
    name: str,
    names: str = _LOOPBACK,
    private: Sequence[Path] = (),
    entry: tuple[str, ...] = (),
) -> Host:
    """Start a host without a link.

    ``names`` is its /etc/hosts; nobody answers what is not in it. ``private`` are folders that are
    empty at first and that no other host sees; the rest of the file system is the machine's.
    ``entry`` is put before each command. LabError if the kernel refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {
            "/etc/hosts": names,
            "/etc/resolv.conf": "",
            "/proc/sys/kernel/random/boot_id": f"{uuid.uuid4()}\n",
        }
        mounts = [
            "mount -t tmpfs tmpfs /dev/shm",
            *(f"mount -t tmpfs tmpfs '{path}'" for path in private),
        ]
        for number, (path, text) in enumerate(files.items()):
            source = Path(folder, str(number))
            source.write_text(text)
            mounts.append(f"mount --bind {source} {path}")
        script = "\n".join(
            ["set -e", f"hostname {name}", *mounts, "ip link set lo up", "echo up", "exec cat"]
        )
        first = start_keeper(
            [*entry, *_UNSHARE, "sh", "-c", script], f"host {name!r} does not start"
        )
    return Host(name, _children(first.pid)[0], _first=first, _entry=entry)


def start_keeper(command: Sequence[str], failure: str) -> subprocess.Popen[str]:
    """Start a process that says ``up``, and that ends with its standard input, which this process
    holds.

    LabError, ``failure`` and what it printed, when it ends instead.
    """
    keeper = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert keeper.stdout is not None
    if (said := keeper.stdout.readline()) != "up\n":
        said += keeper.communicate()[0]
        raise LabError(f"{failure}: {said.strip() or 'it printed nothing'}")
    return keeper


def checked(command: Sequence[str], **options: Any) -> str:
    """Run a command and return what it printed on standard output. LabError, with all it
    printed, if it fails.
    """
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, capture_output=True, text=True, **options
    )
    if done.returncode:
        raise LabError(
            f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
