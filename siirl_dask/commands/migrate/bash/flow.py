"""Signals by which a script's commands end, and the commands that it would have run."""

from __future__ import annotations

from dataclasses import dataclass

from siirl_dask.commands.migrate.bash.values import Word


class ExitSignal(Exception):
    """The script, or a subshell of it, ends here."""


class ReturnSignal(Exception):
    """A function ends here."""


class BreakSignal(Exception):
    """A loop ends here."""


class ContinueSignal(Exception):
    """A round of a loop ends here."""


@dataclass(frozen=True, slots=True)
class CollectedCommand:
    """A command whose words may be a trainer's."""

    words: tuple[Word, ...]
    line: int
