"""The details that a profiler records. The configuration names one, and imports no torch for it."""

from __future__ import annotations

from enum import StrEnum


class ProfileLevel(StrEnum):
    """Details of a profile."""

    time = "time"
    """Operators and kernels, with their times."""
    memory = "memory"
    """Shapes and memory as well."""
    stacks = "stacks"
    """The Python lines that called them as well."""
