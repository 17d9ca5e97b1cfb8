"""Numbers, bytes and times in few digits, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_MOST_DIGITS = 9
_ROUNDED = 1.001  # 0.03 - 0.02 is a little less than 0.01
_POWERS = {12: "T", 9: "G", 6: "M", 3: "k"}


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with three or four digits that count, or with ``digits`` where these are
    more; ``-`` for none.
    """
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e+")
    if size >= 1e5:
        power = next(power for power in _POWERS if size >= 10**power)
        return f"{value / 10**power:.{max(4, digits)}g}{_POWERS[power]}"
    if size >= 1000:
        return f"{value:,.{max(0, digits - len(str(int(size))))}f}"
    if size < 100:
        return f"{value:.{digits}g}"
    if float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.{max(1, digits - 3)}f}"


def numbers(values: Sequence[float]) -> list[str]:
    """Return the numbers of an axis, ascending, with as many digits as tell neighbours apart."""
    apart = min((after - before for before, after in pairwise(values)), default=0.0)
    digits = 3
    if 0 < apart < math.inf:
        largest = max(abs(value) for value in values)
        needed = math.floor(math.log10(largest)) - math.floor(math.log10(apart * _ROUNDED)) + 1
        digits = min(max(digits, needed), _MOST_DIGITS)
    return [number(value, digits) for value in values]


def size(nbytes: float | None) -> str:
    """Return bytes with a unit; ``-`` for none."""
    if nbytes is None:
        return "-"
    power = 0
    left = float(nbytes)
    while left >= 999.5 and power < len(_UNITS) - 1:
        power = power + 1
        left = left / 1000
    if not power:
        return f"{left:.0f} B"
    return f"{left:.3g} {_UNITS[power]}"


def duration(seconds: float | None) -> str:
    """Return seconds as a time that people read, such as ``1 h 2 min``; ``-`` for none."""
    if seconds is None:
        return "-"
    if seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    hours, minute = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minute} min"
    return f"{hours // 24} d {hours % 24} h"
