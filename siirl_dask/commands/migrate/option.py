"""A row of the table of options."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class Use(StrEnum):
    """Fate of an option."""

    RULE = "becomes"
    """It becomes the keys of ``ours``, in the way that ``note`` tells."""
    ALWAYS = "always"
    """It asks for what is always so here, or it changes nothing that a run computes."""
    NONE = "none"
    """It has no counterpart; ``note`` is the reason."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option of verl or siiRL, or several that share a fate: ``names`` may end in ``*``."""

    names: tuple[str, ...]
    use: Use
    ours: str = ""
    note: str = ""
    decides: tuple[str, ...] = ()
    """Keys of ours, the first of which that the file has is left open where an option without a
    counterpart changes what is learned."""

    def matches(self, name: str) -> bool:
        """Whether an option is called so, or begins so."""
        return any(fnmatchcase(name, known) for known in self.names)

    def counterpart(self) -> str:
        """Return our keys as the page shows them, or that there are none."""
        if self.use is Use.NONE:
            return "**none**"
        if not self.ours:
            return "always so"
        return ", ".join(f"`{key}`" for key in self.ours.split(", "))


def rule(names: str, ours: str, note: str = "") -> Option:
    """Return the row of options that become ``ours``; names are separated by spaces."""
    return Option(tuple(names.split()), Use.RULE, ours, note)


def always(names: str, note: str) -> Option:
    """Return the row of options that ask for what is always so."""
    return Option(tuple(names.split()), Use.ALWAYS, "", note)


def none(names: str, note: str, *, decides: str = "") -> Option:
    """Return the row of options without a counterpart. ``decides`` has the keys to ask for where
    such an option changes what is learned, so that no file trains without it unseen.
    """
    return Option(tuple(names.split()), Use.NONE, "", note, tuple(decides.split()))
