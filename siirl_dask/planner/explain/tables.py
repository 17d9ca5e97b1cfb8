"""Words and aligned tables for readers of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from siirl_dask.planner.spec.names import function_name

PACKAGE = __name__.split(".")[0]
_WIDTH = 120
_GAP = 2
LEAST = 30
"""Least width of a table's last column, in characters."""
_UNITS = ("kB", "MB", "GB", "TB")
_RUNS = 3  # of workers that are listed before the rest is only counted


def short_name(fn: object) -> str:
    """Return the name of a function, or of a partial's function, without the name of this
    package.
    """
    return function_name(getattr(fn, "func", fn)).removeprefix(PACKAGE)


def worker_ranges(members: Sequence[str], workers: tuple[str, ...]) -> str:
    """Return the ranges of neighbouring workers, ``w0..w511 (512)``; beyond a few ranges, only
    their count.
    """
    place = {worker: index for index, worker in enumerate(workers)}
    runs: list[list[str]] = []
    for worker in sorted(members, key=place.__getitem__):
        if runs and place[worker] == place[runs[-1][-1]] + 1:
            runs[-1].append(worker)
        else:
            runs.append([worker])
    shown = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs[:_RUNS]]
    more = [".."] if len(runs) > _RUNS else []
    count = f" ({len(members)})" if len(members) > 2 else ""
    return ", ".join(shown + more) + count


def readable_bytes(count: int) -> str:
    """Return bytes with a unit, rounded up so that an upper bound stays one."""
    if count < 1000:
        return f"{count} B"
    power = min((len(str(count)) - 1) // 3, len(_UNITS))
    tenths = -(-count // (1000**power // 10))
    return f"{tenths // 10:,}.{tenths % 10} {_UNITS[power - 1]}"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows in aligned columns; a text that is too wide goes on in its column on the next
    line.
    """
    natural = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    room = _WIDTH - _GAP * len(header) - min(natural[-1], LEAST)
    fixed = _shrunk(natural[:-1], room)
    widths = [*fixed, max(_WIDTH - _GAP * len(header) - sum(fixed), LEAST)]
    lines = []
    for row in (header, *rows):
        cells = [
            wrap(text, width, break_on_hyphens=False)
            for text, width in zip(row, widths, strict=True)
        ]
        for line in range(max(map(len, cells))):
            parts = (cell[line] if line < len(cell) else "" for cell in cells)
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            lines.append((" " * _GAP + (" " * _GAP).join(padded)).rstrip())
    return "\n".join(lines)


def _shrunk(widths: list[int], room: int) -> list[int]:
    """Narrow the widest columns until all fit."""
    widths = list(widths)
    while sum(widths) > room:
        widths[widths.index(max(widths))] -= 1
    return widths


def steps_behind(steps: int) -> str:
    """Return ``1 step behind`` or ``2 steps behind``."""
    return f"{steps} step{'' if steps == 1 else 's'} behind"
