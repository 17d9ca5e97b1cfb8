"""Environments: what a policy acts on over several turns.

``build_environments`` is imported on first use: processes that hold environments start in a fifth
of the time without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from siirl_dask.environments.protocol import (
    Action,
    Answer,
    Environments,
    Failure,
    Message,
    OnAnswer,
    Opening,
    Session,
    Step,
    Text,
)

if TYPE_CHECKING:
    from siirl_dask.environments.builder import WorkerEnvironments, build_environments

__all__ = [
    "Action",
    "Answer",
    "Environments",
    "Failure",
    "Message",
    "OnAnswer",
    "Opening",
    "Session",
    "Step",
    "Text",
    "WorkerEnvironments",
    "build_environments",
    "pictures",
]


def __getattr__(name: str) -> Any:
    if name not in ("WorkerEnvironments", "build_environments"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from siirl_dask.environments import builder

    return getattr(builder, name)
