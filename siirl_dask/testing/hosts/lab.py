"""The lab: hosts with one link each to a switch. Links have a rate and a delay, and can be pulled.

Needs Linux with namespaces (as root, or where users may make them), and unshare, nsenter, ip and
tc. A lab of four hosts starts in 0.3 s.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

from siirl_dask.testing.hosts import delay_switch
from siirl_dask.testing.hosts.host import Host, LabError, checked, start_host, start_keeper

_NET = "198.18.0"  # RFC 2544: for benchmarks, routed nowhere
_NET6 = "fd00:18:"
_PROGRAMS = ("unshare", "nsenter", "ip", "tc", "mount")
_QUEUE = 0.05  # seconds that a frame may wait for a slower link before it is dropped


class Names(StrEnum):
    """The content of a host's /etc/hosts as to the lab's names."""

    ADDRESS = "address"
    """Each name is at its host's address, as with a name server."""
    LOOPBACK = "loopback"
    """The same, but a host's own name is at 127.0.1.1: what Debian's installer writes."""
    NONE = "none"
    """No name is known, not even the host's own."""


@dataclass(frozen=True, slots=True)
class Links:
    """The rate and delay of every host's link, in both directions."""

    bits_per_second: float | None = None
    """None: as fast as the kernel."""
    delay: float = 0.0
    """Seconds from one host to another. Above 0, frames pass a process of the lab: up to 0.9
    GB/s for one stream."""


def why_no_lab() -> str | None:
    """Return why this machine cannot have a lab, or None where it can."""
    if sys.platform != "linux":
        return f"a lab of hosts needs Linux, not {sys.platform}"
    if missing := [program for program in _PROGRAMS if shutil.which(program) is None]:
        return f"a lab of hosts needs {', '.join(missing)} (Debian: iproute2, util-linux)"
    try:
        Lab(1).close()
    except LabError as error:
        return f"a lab of hosts needs namespaces: {error}"
    return None


class Lab:
    """``count`` hosts at one switch. Closing it, or the end of its process by whatever cause, takes
    all of it away.

    ``private`` are folders that each host has for itself. LabError where the machine cannot have a
    lab.
    """

    def __init__(
        self,
        count: int,
        *,
        links: Links | None = None,
        names: Names = Names.ADDRESS,
        private: Sequence[Path] = (),
    ) -> None:
        self.links = Links() if links is None else links
        self.hosts: list[Host] = []
        self._helpers: list[Host] = []
        self._relay: subprocess.Popen[str] | None = None
        try:
            entry = () if os.geteuid() == 0 else self._enter_user_namespace()
            self._switch = start_host("switch", entry=entry)
            self._helpers.append(self._switch)
            self._switch.run("ip", "link", "add", "bridge", "type", "bridge")
            self._switch.run("ip", "link", "set", "bridge", "up")
            for index in range(count):
                host = start_host(f"host{index}", _hosts_file(names, index, count), private, entry)
                host.address = f"{_NET}.{10 + index}"
                host.address6 = f"{_NET6}:{10 + index}"
                self.hosts.append(host)
            if self.links.delay:
                self._relay = self._start_relay(entry)
            else:
                self._lay_cables()
            self.set_rate(self.links.bits_per_second)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def set_rate(self, bits_per_second: float | None) -> None:
        """Limit every link, in each direction; None takes the limit away."""
        for index, host in enumerate(self.hosts):
            _shape(host, "eth0", bits_per_second)
            if self._relay is None:
                _shape(self._switch, f"port{index}", bits_per_second)
            else:
                self._tell("rate", index, bits_per_second or 0)

    def pull(self, host: Host) -> None:
        """Pull the host's link: nothing passes, and its connections are not told."""
        self._plug(host, False)

    def plug(self, host: Host) -> None:
        """Plug the host's link in again."""
        self._plug(host, True)

    def power_off(self, host: Host) -> None:
        """Switch the host off: its peers are not told."""
        self.pull(host)
        host.crash()

    def close(self) -> None:
        """Switch all hosts off. It may be called again."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        for host in [*self.hosts, *reversed(self._helpers)]:
            host.crash()

    def _enter_user_namespace(self) -> tuple[str, ...]:
        """Return what enters a user namespace in which this user may do all that the lab needs."""
        unshare = ("unshare", "--user", "--map-root-user", "--kill-child=SIGKILL")
        first = start_keeper([*unshare, "sh", "-c", "echo up; exec cat"], "no user namespace")
        self._helpers.append(Host("user", first.pid, _first=first))
        return ("nsenter", "-t", str(first.pid), "-U", "--preserve-credentials", "--")

    def _lay_cables(self) -> None:
        """Give each host one end of a pair of virtual Ethernet devices whose other end is at the
        switch.
        """
        for index, host in enumerate(self.hosts):
            pair = (
                "ip",
                "link",
                "add",
                f"port{index}",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(host.pid),
            )
            checked([*self._switch._entry, "nsenter", "-t", str(self._switch.pid), "-n", *pair])
            self._switch.run("ip", "link", "set", f"port{index}", "master", "bridge", "up")
            _address(host)

    def _start_relay(self, entry: tuple[str, ...]) -> subprocess.Popen[str]:
        """Start the switch with delay: kernels without netem have no other."""
        program = [sys.executable, delay_switch.__file__, str(self.links.delay), str(_QUEUE)]
        command = [*entry, *program, *(str(host.pid) for host in self.hosts)]
        relay = start_keeper(command, "a link with delay needs a switch that may open /dev/net/tun")
        for host in self.hosts:
            _address(host)
        return relay

    def _plug(self, host: Host, up: bool) -> None:
        index = self.hosts.index(host)
        if self._relay is None:
            self._switch.run("ip", "link", "set", f"port{index}", "up" if up else "down")
        else:
            self._tell("up" if up else "down", index, 0)

    def _tell(self, verb: str, index: int, value: float) -> None:
        assert self._relay is not None
        assert self._relay.stdin is not None
        assert self._relay.stdout is not None
        self._relay.stdin.write(f"{verb} {index} {value}\n")
        self._relay.stdin.flush()
        if self._relay.stdout.readline() != "done\n":
            raise LabError(f"the switch ended: {self._relay.communicate()[0]}")


def _hosts_file(names: Names, index: int, count: int) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if names is Names.LOOPBACK:
        lines.append(f"127.0.1.1 host{index}")
    if names is not Names.NONE:
        lines += [f"{_NET}.{10 + other} host{other}" for other in range(count)]
    return "\n".join(lines) + "\n"


def _address(host: Host) -> None:
    host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
    host.run("ip", "addr", "add", f"{host.address6}/64", "dev", "eth0", "nodad")
    host.run("ip", "link", "set", "eth0", "up")


def _shape(host: Host, device: str, bits_per_second: float | None) -> None:
    """Limit what leaves by a device with a token bucket, tbf(8), whose burst lasts 2 ms and has
    256 kB at least.
    """
    if bits_per_second is None:
        if "tbf" in host.run("tc", "qdisc", "show", "dev", device):
            host.run("tc", "qdisc", "del", "dev", device, "root")
        return
    burst = max(256_000, int(bits_per_second / 8 * 0.002))
    limit = (
        "rate",
        f"{bits_per_second:.0f}bit",
        "burst",
        burst,
        "latency",
        f"{_QUEUE * 1e3:.0f}ms",
    )
    host.run("tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)
