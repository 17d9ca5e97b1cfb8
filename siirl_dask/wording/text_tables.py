"""Words, sizes and aligned tables for people who read text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from textwrap import wrap

_WIDTH = ContextVar("width of tables", default=120)
_NARROWEST = 60
_GAP = 2
_INDENT = 6  # of a last column that has lines of its own
LEAST = 30
"""Least width of a table's last column, in characters."""
_UNITS = ("kB", "MB", "GB", "TB")
_RUNS = 3  # of workers that are listed before the rest is only counted


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
    shown = []
    for run in runs[:_RUNS]:
        if len(run) > 2:
            shown.append(f"{run[0]}..{run[-1]}")
        else:
            shown.append(", ".join(run))
    if len(runs) > _RUNS:
        shown.append("..")
    count = ""
    if len(members) > 2:
        count = f" ({len(members)})"
    return ", ".join(shown) + count


def readable_bytes(count: int) -> str:
    """Return bytes with a unit, rounded up so that an upper bound stays one."""
    if count < 1000:
        return f"{count} B"
    power = min((len(str(count)) - 1) // 3, len(_UNITS))
    tenths = -(-count // (1000**power // 10))
    return f"{tenths // 10:,}.{tenths % 10} {_UNITS[power - 1]}"


@contextmanager
def tables_within(columns: int) -> Iterator[None]:
    """Let tables take at most so many columns within: 60 at least, and 120 at most."""
    token = _WIDTH.set(min(max(columns, _NARROWEST), _WIDTH.get()))
    try:
        yield
    finally:
        _WIDTH.reset(token)


def _longest_word(text: str) -> int:
    return max((len(word) for word in text.split()), default=0)


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows in aligned columns; a text that is too wide goes on in its column on the next
    line. Where there is no room for the last column beside the others, it has lines of its own.
    """
    natural = []
    words = []
    for place in range(len(header)):
        texts = [row[place] for row in (header, *rows)]
        natural.append(max(len(text) for text in texts))
        words.append(max(_longest_word(text) for text in texts))
    room = _WIDTH.get() - _GAP * len(header)
    last = min(natural[-1], LEAST)
    below = sum(words[:-1]) + last > room
    if below:
        fixed = _shrunk(natural[:-1], words[:-1], _WIDTH.get() - _GAP * (len(header) - 1))
        widths = [*fixed, max(_WIDTH.get() - _INDENT, words[-1])]
    else:
        fixed = _shrunk(natural[:-1], words[:-1], room - last)
        widths = [*fixed, max(room - sum(fixed), last)]
    lines = []
    for row in (header, *rows):
        cells = [
            wrap(text, width, break_on_hyphens=False)
            for text, width in zip(row, widths, strict=True)
        ]
        beside = cells
        if below:
            beside = cells[:-1]
        for line in range(max(map(len, beside))):
            parts = (cell[line] if line < len(cell) else "" for cell in beside)
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=False))
            lines.append((" " * _GAP + (" " * _GAP).join(padded)).rstrip())
        if below:
            lines += [" " * _INDENT + text for text in cells[-1]]
    return "\n".join(lines)


def _shrunk(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Narrow the widest columns until all fit, none below its longest word."""
    widths = list(widths)
    while sum(widths) > room:
        loose = [index for index, width in enumerate(widths) if width > least[index]]
        if not loose:
            break
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths


def steps_behind(steps: int) -> str:
    """Return ``1 step behind`` or ``2 steps behind``."""
    if steps == 1:
        return "1 step behind"
    return f"{steps} steps behind"
