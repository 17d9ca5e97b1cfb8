"""The result of one check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class DoctorState(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing, and no reason for a run to fail."""
    FAULT = "fault"
    """A run that needs this fails, or is wrong."""


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The result of checking one part of the machine, the cluster or the store."""

    part: str
    state: DoctorState
    text: str
    cure: str = ""
    """A remedy, in one line."""


def ok(part: str, text: str) -> DoctorFinding:
    """Return the finding that a part is as it should be."""
    return DoctorFinding(part, DoctorState.OK, text)


def note(part: str, text: str, cure: str = "") -> DoctorFinding:
    """Return a finding that stops nothing."""
    return DoctorFinding(part, DoctorState.NOTE, text, cure)


def fault(part: str, text: str, cure: str) -> DoctorFinding:
    """Return a fault with its cure."""
    return DoctorFinding(part, DoctorState.FAULT, text, cure)
