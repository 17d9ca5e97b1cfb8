"""The machine of the lab: parts as ``parts.py`` measured them, and what they predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .demand import Demand
from .model import Ints, Layout, StepRows, most


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Seconds of a core that the transformers engine takes; a batch runs until its longest row
    ends.
    """

    batch: float
    prompt_token: float
    step: float
    """For each token of the longest row, however many rows there are."""
    row_step: float
    """For each row and each of these tokens."""


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """Seconds of a core."""

    logprobs: float
    """For a pass over any rows."""
    logprobs_token: float
    update: float
    """For a mini-batch of any rows: the optimizer's step over all parameters."""
    update_token: float


@dataclass(frozen=True, slots=True)
class TransferCost:
    """Cost of a message of many bytes: seconds of a core for each of them, and round trips."""

    byte: float
    """Seconds of a core for each byte, at both ends, as far as one waits for the other."""
    trips: float
    """Round trips of all bytes of the model, between two workers."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step without work in one layout."""

    compute: float
    """Seconds of a core, along the way of the last worker."""
    trips: float


@dataclass(frozen=True, slots=True)
class LabMachine:
    """Parts that were measured, by core seconds, bytes and round trips. It is one model's: its
    weights are given.
    """

    weights: int
    """Bytes of the model's parameters, and of its gradients."""
    engine: EngineCost
    trainer: TrainerCost
    sums: TransferCost
    """Sum of gradients between two workers."""
    stream: TransferCost
    """Transfer of new weights from a learner to an engine, beyond ``copy_byte``."""
    copy_byte: float
    """Core seconds for each byte of new weights, to make them and to load them."""
    steps: dict[str, StepCost]
    """Costs by the layout's name."""

    def generate(self, prompts: Ints, responses: Ints) -> Demand:
        cost = self.engine
        longest, rows = responses.max(1), responses.shape[1]
        seconds = (
            cost.batch
            + cost.prompt_token * prompts.sum(1)
            + longest * (cost.step + cost.row_step * rows)
        )
        return Demand(compute=float(seconds.max()))

    def logprobs(self, rows: Ints, owners: Ints, learners: int) -> Demand:
        return Demand(
            compute=self.trainer.logprobs
            + self.trainer.logprobs_token * most(rows, owners, learners)
        )

    def update(self, rows: Ints, owners: Ints, learners: int) -> Demand:
        own = Demand(
            compute=self.trainer.update + self.trainer.update_token * most(rows, owners, learners)
        )
        if learners == 1:
            return own
        # of a ring: each byte leaves a worker once and comes once
        wire = 2 * (learners - 1) / learners * self.weights
        sums = Demand(self.sums.byte * wire, wire, self.sums.trips * (learners - 1))
        return own + sums

    def hand_over(self, layout: Layout) -> Demand:
        cost = self.stream
        loaded = Demand(compute=self.copy_byte * self.weights)
        if layout.together:  # each engine takes what its own trainer has
            return loaded
        # an engine gets an equal part from every learner, at once: a window for each, so that round
        # trips are shared
        trips = cost.trips / layout.learners
        # a learner sends its part to every engine
        wire = self.weights * max(1.0, layout.engines / layout.learners)
        return loaded + Demand(cost.byte * self.weights, wire, trips)

    def fixed(self, layout: Layout, rows: StepRows) -> Demand:
        cost = self.steps[layout.name]
        return Demand(compute=cost.compute, trips=cost.trips)

    @property
    def shares_prompts(self) -> bool:
        return True

    @property
    def quadratic_from(self) -> int:
        return 0


def from_plain(values: dict[str, Any]) -> LabMachine:
    """Return the machine that ``dataclasses.asdict`` made a dict of."""
    return LabMachine(
        weights=values["weights"],
        engine=EngineCost(**values["engine"]),
        trainer=TrainerCost(**values["trainer"]),
        sums=TransferCost(**values["sums"]),
        stream=TransferCost(**values["stream"]),
        copy_byte=values["copy_byte"],
        steps={name: StepCost(**cost) for name, cost in values["steps"].items()},
    )


def line_fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return non-negative coefficients of ``columns`` whose sum is nearest to ``seconds``, in
    relative terms.

    A coefficient that would be negative is 0 and the others are fitted anew.
    """
    matrix, target = np.array(columns).T, np.array(seconds)
    matrix, target = matrix / target[:, None], np.ones_like(target)
    kept = list(range(matrix.shape[1]))
    while True:
        found = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            break
        kept.pop(int(found.argmin()))
    result = [0.0] * matrix.shape[1]
    for index, value in zip(kept, found, strict=True):
        result[index] = max(0.0, float(value))
    return result
