"""Chooses the lines that something long prints where there is no terminal for a bar."""

from __future__ import annotations

_SILENCE = 60.0  # seconds after which there is a line in any case


class Tenths:
    """Chooses a line for each tenth that is done, and one for each minute without another."""

    def __init__(self, now: float) -> None:
        """``now``: seconds by the clock of whoever asks."""
        self._tenth = 0
        self._printed_at = now

    def is_due(self, done: float, total: float, now: float) -> bool:
        """Return whether ``done`` of ``total`` is worth a line ``now``, which is printed then."""
        tenth = int(10 * done / total)
        if tenth == self._tenth and now - self._printed_at < _SILENCE:
            return False
        self._tenth = tenth
        self._printed_at = now
        return True
