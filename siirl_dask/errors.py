"""Every exception this package raises on purpose, as one tree.

``SiirlError`` is the root. ``UserError`` and below are mistakes in what was given (config, DAG, data, reward): they are
raised before anything starts wherever that is possible, and their text says what was given, what was expected and what
to do. ``RunError`` and below are things that went wrong while a run was under way.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SiirlError(Exception):
    """Root of every exception this package raises on purpose."""


class UserError(SiirlError):
    """Something that was given cannot be used."""


class ConfigError(UserError):
    """A config key, type or value is not usable."""


class PlanError(UserError):
    """The DAG, its column contracts or its placement do not hold together."""


class DataError(UserError):
    """A dataset is missing, corrupt, or lacks a column."""


class RewardError(UserError):
    """A reward function raised or returned something that is not a number."""


class RunError(SiirlError):
    """A run that had started could not go on."""


class NodeError(RunError):
    """A node function raised, or broke its column contract."""


class TrainingError(RunError):
    """The loss or the gradient is not a finite number."""


class WorkerLost(RunError):
    """A worker left the cluster while its chain was running."""


class PeerError(RunError):
    """A peer is dead, stalled, or sent something that is refused."""


class CheckpointError(RunError):
    """A checkpoint could not be written, or what is in it cannot be used."""


class Aborted(RunError):
    """This worker was told to stop because another one failed or the run was cancelled."""


class Interrupted(RunError):
    """The user stopped the run (Ctrl-C or SIGTERM)."""


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the nearest valid spelling, or an empty string if nothing is near."""
    near = get_close_matches(given, list(valid), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
