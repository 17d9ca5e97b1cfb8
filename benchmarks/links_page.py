"""The page of ``links.py``: its tables, before what somebody has written below them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import distributed

Record = Mapping[str, Any]
SYSTEMS = {"ours": "ours", "dask": "Dask's graph", "ray": "Ray's refs"}
_KEPT = "## What limits where"
_INTRODUCTION = """# Rows over links

{megabytes:.0f} MB of rows go into each target: with one pair from one host of the lab (`siirl_dask.testing.hosts`)
to another, with two from hosts 0 and 1 to hosts 2 and 3, each source to both. Plain TCP streams carry as many bytes
from host to host of each pair, at the same time. All take turns in the same minute; the median of {n} rounds (lowest to
highest), in MB/s into each target. Every byte of every round was compared. *Of one stream* is ours over one raw stream
of each pair.
"""
_CPU = """## CPU

Seconds of CPU for each GB, user and system, of all processes of a system, without what they take when idle.
"""


def write_page(out: Path, records: Sequence[Record], share: int, n: int, command: str) -> None:
    """Write the tables, and keep what the page has from its part on limits on."""
    old = out.read_text() if out.exists() else ""
    kept = old[old.index(_KEPT) :] if _KEPT in old else f"{_KEPT}\n"
    text = "\n".join(
        [
            _INTRODUCTION.format(megabytes=share / 1e6, n=n),
            *rates_table(records),
            "",
            _CPU,
            *cpu_table(records),
            "",
            f"{date.today():%-d %B %Y}, {os.cpu_count()} cores for all hosts, Linux "
            f"{platform.release()}, Python {platform.python_version()}, distributed "
            f"{distributed.__version__}. To repeat it:",
            "",
            f"    {command}",
            "",
            kept,
        ]
    )
    out.write_text(text)


def rates_table(records: Sequence[Record]) -> Iterator[str]:
    systems = [name for name in SYSTEMS if name in records[0]]
    streams = [name for name in records[0] if name.startswith("raw")]
    headings = [
        "link",
        *(f"{name.split()[1]} raw" for name in streams),
        *(SYSTEMS[name] for name in systems),
    ]
    yield from _heading([*headings, "of one stream", "load"])
    for record in records:
        raw = [f"{record[name]['MBps']:,.0f}" for name in streams]
        ours = [_spread(record[name]) for name in systems]
        ratio = f"{record['ours']['MBps'] / record['raw 1']['MBps']:.2f}"
        yield _line([_link(record), *raw, *ours, ratio, f"{record['load']:.0f}"])


def cpu_table(records: Sequence[Record]) -> Iterator[str]:
    names = ["raw 1", "raw 8", *(name for name in SYSTEMS if name in records[0])]
    yield from _heading(["link", "1 raw", "8 raw", *(SYSTEMS[name] for name in names[2:])])
    for record in records:
        yield _line([_link(record), *(f"{record[name]['cpu_s_per_GB']:.2f}" for name in names)])


def _link(record: Record) -> str:
    pairs = "1 pair" if record["pairs"] == 1 else f"{record['pairs']} pairs"
    rate = f"{record['rate'] / 1e9:g} Gbit/s" if record["rate"] else "unlimited"
    return f"{pairs}, {rate}, {record['delay'] * 1000:g} ms"


def _spread(cell: Mapping[str, float]) -> str:
    return f"{cell['MBps']:,.0f} ({cell['slowest']:,.0f} to {cell['fastest']:,.0f})"


def _heading(cells: Sequence[str]) -> Iterator[str]:
    yield _line(cells)
    yield _line(["---", *["---:"] * (len(cells) - 1)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
