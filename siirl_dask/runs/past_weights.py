"""Chooses the checkpoints whose weights nodes get that run again on the stored rows of earlier
steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.runs.checkpoints import Checkpoint, find_checkpoints


class Weights(StrEnum):
    """The ways to choose a checkpoint without its step."""

    BEFORE = "before"
    """For each step the newest one of an earlier step: exactly the step's weights where it is that
    of the step before. Without one, the weights that training began with."""
    LATEST = "latest"
    """The newest one, for all steps."""
    NONE = "none"
    """None: the weights that training began with, those of ``model.path``."""


@dataclass(frozen=True, slots=True)
class StepsWithWeights:
    """Steps that are run again with the same weights."""

    steps: tuple[int, ...]
    checkpoint: Checkpoint | None
    """None for the weights that training began with."""


def checkpoint_choice(text: str) -> int | Weights:
    """Return what ``--checkpoint`` names: a step, or a word. ConfigError for anything else."""
    if text.isdecimal():
        return int(text)
    try:
        return Weights(text)
    except ValueError:
        known = ", ".join(Weights)
        near = did_you_mean(text, map(str, Weights))
        raise ConfigError(
            f"--checkpoint {text}: expected the step of a checkpoint, or one of {known}{near}"
        ) from None


def past_weights(
    run_url: str, steps: Iterable[int], choice: int | Weights
) -> list[StepsWithWeights]:
    """Return the steps in groups, each with its checkpoint; ConfigError if the run has not the
    one that is named.
    """
    if choice is Weights.NONE:
        return [StepsWithWeights(tuple(steps), None)]
    there = {found.step: found for found in find_checkpoints(run_url) if found.record}
    if choice is Weights.BEFORE:
        groups = groupby(
            steps, lambda step: max((one for one in there if one < step), default=None)
        )
        return [
            StepsWithWeights(tuple(own), None if one is None else there[one]) for one, own in groups
        ]
    wanted = max(there, default=None) if choice is Weights.LATEST else choice
    if wanted is None or wanted not in there:
        raise ConfigError(
            f"--checkpoint {choice}: run {run_url!r} has no such checkpoint "
            f"({_told(sorted(there))})"
        )
    return [StepsWithWeights(tuple(steps), there[wanted])]


def _told(steps: Sequence[int]) -> str:
    if steps:
        return f"it has those of steps {', '.join(map(str, steps))}"
    return "it has none: see checkpoint.every"
