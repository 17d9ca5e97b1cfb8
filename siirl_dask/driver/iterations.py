"""Generates the iterations of a run in order: phase, step, and whether the pipeline drains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import count

from siirl_dask.config import Config
from siirl_dask.planner import Iteration, Phase
from siirl_dask.runs.stages import Stage


def iterations(
    config: Config,
    phases: Collection[str],
    done: int = 0,
    stages: Iterable[Stage] = (),
    measured: Collection[tuple[Phase, int]] = (),
) -> Iterator[Iteration]:
    """Yield every iteration of a run in order, after ``done`` steps.

    Validation comes before the first step, every ``validation.every`` steps and after the last; a checkpoint every
    ``checkpoint.every`` steps and after the last; the test at the end. A resumed run begins with the weights. It
    replays steps that have a stage, and leaves out validations that are ``measured``, by phase and step.

    A training step that a validation or a checkpoint follows is a drain, also where the validation is left out: nodes
    with a lag catch up in it, so that these see everything of their step.
    """
    sequence = count()
    stored = {stage.step: stage for stage in stages}
    if Phase.WEIGHTS in phases:
        yield Iteration(Phase.WEIGHTS, done, next(sequence))
    if Phase.VALIDATION in phases and not done and (Phase.VALIDATION, 0) not in measured:
        yield Iteration(Phase.VALIDATION, 0, next(sequence))
    steps, every = config.run.steps, config.checkpoint.every
    for step in range(done + 1, steps + 1):
        last = step == steps
        validates = Phase.VALIDATION in phases and (step % config.validation.every == 0 or last)
        saves = bool(every) and (step % every == 0 or last)
        iteration = Iteration(Phase.TRAIN, step, next(sequence), validates or saves or last)
        if stage := stored.get(step):
            iteration = replace(iteration, phase=Phase.REPLAY, position=stage.position, frontier=stage.table)
        yield iteration
        if validates and (Phase.VALIDATION, step) not in measured:
            yield Iteration(Phase.VALIDATION, step, next(sequence))
        if saves:
            yield Iteration(Phase.CHECKPOINT, step, next(sequence))
    if Phase.TEST in phases:
        yield Iteration(Phase.TEST, steps, next(sequence))


def until_asked(iterations: Iterable[Iteration], asked: Callable[[], bool], steps: int) -> Iterator[Iteration]:
    """Yield the iterations; once ``asked()`` is true, end after a training step, its validation and its checkpoint.

    That step drains the pipeline. The last one of all ``steps`` ends nothing: what follows it is done as well.
    """
    ending, step = False, 0
    for iteration in iterations:
        kind = iteration.phase.counts_as
        if kind is Phase.TRAIN:
            if ending:
                yield Iteration(Phase.CHECKPOINT, step, iteration.sequence)
                return
            step, ending = iteration.step, asked() and iteration.step < steps
            iteration = replace(iteration, drain=iteration.drain or ending)
        elif kind in (Phase.VALIDATION, Phase.CHECKPOINT):
            ending = ending or (0 < step < steps and asked())
        yield iteration
        if ending and kind is Phase.CHECKPOINT:
            return
