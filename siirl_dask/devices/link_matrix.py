"""Runs the makers' programs that tell how cards are linked, and reads the matrices that they print.

``nvidia-smi topo -m`` and ``npu-smi info -t topo`` print a row and a column for each card, with the
kind of link in each cell, and a legend. Their output is only used to compute faster: what cannot be
read is told and left out.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from siirl_dask.devices.cpus import read_cpus

SELF = "X"
SLOWEST_FIRST = ("SYS", "NODE", "PHB", "PXB", "PIX", "HCCS_SW", "HCCS", "SIO")
"""Kinds of links, by the makers' own names, but for NVLink: ``NV`` and the number of its lanes
is faster than these."""
_NVLINK = re.compile(r"NV(\d{1,3})")
_UNKNOWN = ("NA", "N/A")
_NAME = re.compile(r"(?:GPU|NPU|Phy-ID)(\d{1,4})")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # nvidia-smi underlines its first line, also in a pipe
_AFFINITY = ["CPU", "Affinity"]
_SECONDS = 10.0  # for a program's answer; a driver that is not loaded yet takes seconds
_BYTES = 2**18  # of an answer: a matrix of 64 cards is 40 kB
_MOST_CARDS = 256


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """The cards that a program lists, and their links."""

    numbers: tuple[int, ...] = ()
    """Number of each card by the program."""
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)
    """Kind of link between two cards, by their numbers, both ways; without those that the
    program does not know."""
    near: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """CPUs near each card, by its number, where the program tells them in a last column."""


def speed_of(link: str) -> int:
    """Return a number that is higher for a faster kind of link; -1 for one that is not known."""
    if link == SELF:
        return 2**16
    lanes = _NVLINK.fullmatch(link)
    if lanes:
        return len(SLOWEST_FIRST) + int(lanes[1])
    if link in SLOWEST_FIRST:
        return SLOWEST_FIRST.index(link)
    return -1


def read_matrix(text: str) -> LinkMatrix:
    """Return what a program has printed. ValueError, which says what is wrong, for anything but
    a matrix.
    """
    lines = [line.split() for line in _ESCAPES.sub("", text).splitlines()]
    rows = [line for line in lines if line and _NAME.fullmatch(line[0])]
    if not rows:
        raise ValueError("no line begins with the name of a card")
    header, *rows = rows
    end = next((at for at in range(len(header)) if header[at : at + 2] == _AFFINITY), len(header))
    columns = header[:end]
    telling = header[end:] == _AFFINITY
    names = {name: int(found[1]) for name in columns if (found := _NAME.fullmatch(name))}
    given = {row[0]: row[1:] for row in rows}
    if len(names) > _MOST_CARDS or len({*names.values()}) != len(names) or {*given} != {*names}:
        raise ValueError(
            f"its rows are {sorted(given)[:8]} and its columns {sorted(names)[:8]}: expected the "
            "same"
        )
    links: dict[tuple[int, int], str] = {}
    near: dict[int, frozenset[int]] = {}
    for name, cells in given.items():
        if len(cells) < len(columns):
            raise ValueError(f"the row of {name} has {len(cells)} cells: expected {len(columns)}")
        for other, cell in zip(columns, cells, strict=False):
            if other in names and cell not in _UNKNOWN:
                if speed_of(cell) < 0 or (cell == SELF) != (name == other):
                    raise ValueError(
                        f"the link of {name} and {other} is {cell[:20]!r}, which is not known"
                    )
                links[names[name], names[other]] = cell
        if telling and len(cells) > len(columns) and cells[len(columns)] not in _UNKNOWN:
            near[names[name]] = read_cpus(cells[len(columns)])
    wrong = next((pair for pair, link in links.items() if links.get(pair[::-1]) != link), None)
    if wrong:
        raise ValueError(
            f"the link of cards {wrong[0]} and {wrong[1]} is another one the other way"
        )
    return LinkMatrix(tuple(names.values()), links, near)


def read_addresses(text: str) -> dict[str, int]:
    """Return the number of each card by its PCI address, from lines of both. ValueError for any
    other line.
    """
    numbers = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        found = re.fullmatch(
            r"(\d{1,4})\s*,\s*([0-9a-fA-F]+:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7])", line
        )
        if found is None:
            raise ValueError(f"{line[:80]!r}: expected a number and a PCI address")
        numbers[plain_address(found[2])] = int(found[1])
    return numbers


def plain_address(address: str) -> str:
    """Return a PCI address as sysfs writes it: ``0000:3b:00.0`` for ``00000000:3B:00.0``."""
    domain, _, rest = address.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def ask(command: Sequence[str], seconds: float = _SECONDS) -> str:
    """Return what a program prints, at most some hundred kB. OSError if it is not there, fails,
    or takes too long.
    """
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"there is no {command[0]}")
    with subprocess.Popen(
        [program, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    ) as process:
        assert process.stdout is not None
        try:
            said = _read(process.stdout.fileno(), time.monotonic() + seconds)
            if process.wait(seconds):
                raise OSError(f"it ended with code {process.returncode}")
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it took more than {seconds:g} s") from None
        finally:
            process.kill()
    return said.decode(errors="replace")


def _read(file: int, deadline: float) -> bytes:
    said = bytearray()
    while len(said) <= _BYTES:
        if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("it did not answer in time")
        part = os.read(file, 2**16)
        if not part:
            return bytes(said)
        said += part
    raise OSError(f"it printed more than {_BYTES} bytes")
