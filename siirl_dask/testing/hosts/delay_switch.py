"""A program: an Ethernet switch with delay between hosts, whose frames wait in its memory.

Arguments: seconds of delay, seconds that a frame may wait for a slow port, and a process id in each
host, which gets a tap device ``eth0`` (Linux: networking/tuntap). It prints ``up``, and then
answers each line of standard input with
``done``: ``down N 0``, ``up N 0``, ``rate N BITS_PER_SECOND`` (0: unlimited), N being the port. It
ends with its input.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_MTU = 60_000  # few frames: each costs this process 10 us
_LARGEST = 65_600  # bytes of a frame


@dataclass(slots=True)
class Port:
    """A host's tap device."""

    tap: int
    mac: bytes
    up: bool = True
    seconds_per_byte: float = 0.0
    free: float = 0.0
    """Time at which the frames sent to it so far have left, by its rate."""


def main() -> None:
    delay = float(sys.argv[1])
    patience = float(sys.argv[2])
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    ports = [_open_port(int(pid), number, home) for number, pid in enumerate(sys.argv[3:])]
    print("up", flush=True)
    poll = select.epoll()
    for port in ports:
        poll.register(port.tap, select.EPOLLIN)
    poll.register(0, select.EPOLLIN)
    by_tap = {port.tap: port for port in ports}
    by_mac = {port.mac: port for port in ports}
    waiting: list[tuple[float, int, Port, bytes]] = []
    count = 0
    while True:
        for ready, _ in poll.poll(max(0.0, waiting[0][0] - time.monotonic()) if waiting else -1):
            if ready == 0:
                if not _obey(ports):
                    return
                continue
            source = by_tap[ready]
            for frame in _frames(source):
                known = by_mac.get(frame[:6])
                for target in [known] if known else [port for port in ports if port is not source]:
                    if (due := _departure(target, len(frame), patience)) is not None:
                        count += 1
                        heapq.heappush(waiting, (due + delay, count, target, frame))
        _deliver(waiting)


def _open_port(pid: int, number: int, home: int) -> Port:
    """Make ``eth0`` in the network namespace of ``pid``."""
    libc = ctypes.CDLL(None, use_errno=True)
    space = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if libc.setns(space, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to the network of {pid}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", b"eth0", _IFF_TAP | _IFF_NO_PI))
    mac = bytes([2, 0, 0, 0, 0, number + 1])
    link = [
        "ip",
        "link",
        "set",
        "eth0",
        "address",
        mac.hex(":"),
        "mtu",
        str(_MTU),
        "txqueuelen",
        "20000",
    ]
    subprocess.run(link, check=True)
    libc.setns(home, _CLONE_NEWNET)
    os.close(space)
    return Port(tap, mac)


def _obey(ports: list[Port]) -> bool:
    """Carry out the commands on standard input; False at its end."""
    text = os.read(0, 1 << 16).decode()
    for line in text.splitlines():
        verb, number, value = line.split()
        port = ports[int(number)]
        if verb == "rate":
            port.seconds_per_byte = 8 / float(value) if float(value) else 0.0
        else:
            port.up = verb == "up"
        print("done", flush=True)
    return bool(text)


def _frames(port: Port) -> list[bytes]:
    """Read up to 64 frames that the host sent; what a port sends while it is down is lost."""
    frames = []
    for _ in range(64):
        try:
            frames.append(os.read(port.tap, _LARGEST))
        except BlockingIOError:
            break
    return frames if port.up else []


def _departure(port: Port, size: int, patience: float) -> float | None:
    """Return the time at which a frame has left for a port by its rate; None where its queue is
    full, so it is lost.
    """
    now = time.monotonic()
    start = max(now, port.free)
    if not port.up or start - now > patience:
        return None
    port.free = start + size * port.seconds_per_byte
    return port.free


def _deliver(waiting: list[tuple[float, int, Port, bytes]]) -> None:
    now = time.monotonic()
    while waiting and waiting[0][0] <= now:
        _, _, port, frame = heapq.heappop(waiting)
        if port.up:
            try:
                os.write(port.tap, frame)
            except (BlockingIOError, OSError):
                # the host's queue is full, or its device is down: the frame is lost
                continue


if __name__ == "__main__":
    main()
