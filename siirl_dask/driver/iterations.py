"""Generates the iterations of a run in order: phase, step, and whether the pipeline drains."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain, count, pairwise

from siirl_dask.config import Config
from siirl_dask.planner import Iteration, Phase


def iterations(config: Config, phases: Collection[Phase], done: int = 0) -> Iterator[Iteration]:
    """Yield every iteration of a run in order, after ``done`` steps.

    Validation comes before the first step, every ``validation.every`` steps and after the last; a checkpoint every
    ``checkpoint.every`` steps and after the last; the test at the end. A resumed run begins with the weights.
    """
    sequence = count()
    if Phase.WEIGHTS in phases:
        yield Iteration(Phase.WEIGHTS, done, next(sequence))
    if Phase.VALIDATION in phases and not done:
        yield Iteration(Phase.VALIDATION, 0, next(sequence))
    steps, every = config.run.steps, config.checkpoint.every
    for step in range(done + 1, steps + 1):
        yield Iteration(Phase.TRAIN, step, next(sequence))
        if Phase.VALIDATION in phases and (step % config.validation.every == 0 or step == steps):
            yield Iteration(Phase.VALIDATION, step, next(sequence))
        if every and (step % every == 0 or step == steps):
            yield Iteration(Phase.CHECKPOINT, step, next(sequence))
    if Phase.TEST in phases:
        yield Iteration(Phase.TEST, steps, next(sequence))


def with_drains(iterations: Iterator[Iteration]) -> Iterator[Iteration]:
    """Yield the iterations, and mark each training step that no other one follows as a drain.

    Nodes with a lag catch up in a drain, so that a validation or a checkpoint sees everything of its step.
    """
    for iteration, following in pairwise(chain(iterations, [None])):
        assert iteration is not None
        ends = following is None or following.phase is not Phase.TRAIN
        yield replace(iteration, drain=iteration.phase is Phase.TRAIN and ends)
