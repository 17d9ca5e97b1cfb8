"""The result of checking one part of a run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PartState(StrEnum):
    """The states that a part of a run can be in."""

    WHOLE = "whole"
    UNFINISHED = "unfinished"
    """Begun and never committed, or left by a start that was fenced: nothing reads it, and
    nothing is lost."""
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One part of a run, and what it is found to be."""

    part: str
    """Path of a file or folder in the run's."""
    state: PartState
    text: str
    """Describes what there is, or what is wrong with it."""
    remedy: str = ""
    """Says what a resume makes of it, or what to do; empty where nothing is to be done."""
