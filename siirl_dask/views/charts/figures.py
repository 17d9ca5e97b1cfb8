"""Numbers, bytes and times in few digits, for people."""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_POWERS = {12: "T", 9: "G", 6: "M", 3: "k"}


def number(value: float | None) -> str:
    """Return a number with three or four digits that count; ``-`` for none."""
    if value is None:
        return "-"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e+")
    if size >= 1e5:
        power = next(power for power in _POWERS if size >= 10**power)
        return f"{value / 10**power:.4g}{_POWERS[power]}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 100:
        return f"{value:.3g}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.1f}"


def size(nbytes: float | None) -> str:
    """Return bytes with a unit; ``-`` for none."""
    if nbytes is None:
        return "-"
    power = 0
    left = float(nbytes)
    while left >= 999.5 and power < len(_UNITS) - 1:
        power = power + 1
        left = left / 1000
    return f"{left:.0f} B" if not power else f"{left:.3g} {_UNITS[power]}"


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
    return f"{hours} h {minute} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
