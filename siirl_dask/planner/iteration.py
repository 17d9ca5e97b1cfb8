"""Iterations: passages of all workers through the chains of a plan, and the phases of a run that
they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """The kind of an iteration; all workers are in the same phase."""

    TRAIN = "train"
    REPLAY = "replay"
    """Training step of a resumed run whose rows are stored: its updates are repeated, and
    nothing is generated."""
    VALIDATION = "validation"
    TEST = "test"
    EVALUATION = "evaluation"
    """Pass over a dataset outside a training run (``siirl-dask eval``)."""
    WEIGHTS = "weights"
    """Transfer of the restored weights to the engines, in a resumed run."""
    CHECKPOINT = "checkpoint"
    """Saving of the roles' states; no chain is run."""

    @property
    def counts_as(self) -> Phase:
        """The phase under which its steps are logged and its nodes keep their state: a replay is
        training.
        """
        return Phase.TRAIN if self is Phase.REPLAY else self


def replay_plan(frontier: str) -> str:
    """Return the name of the plan of steps that are replayed from the rows of the table
    ``frontier``.
    """
    return f"{Phase.REPLAY}:{frontier}"


def phase_of(plan: str) -> Phase:
    """Return the phase of a plan's name, as ``Iteration.plan`` gives it."""
    return Phase(plan.partition(":")[0])


@dataclass(frozen=True, slots=True)
class Iteration:
    """One passage of all workers through the chains of a phase."""

    phase: Phase
    step: int
    """Step that is trained, from 1; in other phases, the number of steps trained before."""
    sequence: int
    """Number of the iteration in the run, which makes the keys of its messages unique."""
    drain: bool = False
    """True if no training step follows at once, so that nodes with a lag catch up in this
    iteration."""
    position: int | None = None
    """Number of the next prompt after a replayed step that had drawn more prompts than its own."""
    frontier: str = ""
    """Table whose rows a replayed step begins with."""

    @property
    def plan(self) -> str:
        """Name of the plan whose chains it runs: its phase, and for a replay also the frontier."""
        return replay_plan(self.frontier) if self.phase is Phase.REPLAY else self.phase

    @property
    def batch(self) -> int:
        """Number of the dataset's batch that the iteration reads, from 0."""
        return max(self.step - 1, 0)

    def __str__(self) -> str:
        return f"{self.phase} step {self.step}"
