"""The iterations of a run: their order, and the records of those in progress and those
completed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from distributed import Future
from siirl_storage import FileDigest, Part

from siirl_dask.config import Config
from siirl_dask.context import Metric
from siirl_dask.planner import Iteration, Phase
from siirl_dask.runs.stages import Stage


@dataclass(frozen=True, slots=True)
class CompletedIteration:
    """An iteration that every worker has completed."""

    iteration: Iteration
    seconds: float
    """Seconds since the previous iteration was completed, or since the start."""
    metrics: dict[str, Metric]
    """Metrics of all workers, merged."""


@dataclass(frozen=True, slots=True)
class StagedTable:
    """A table of a step of which every worker has written its part; the step itself may go on."""

    iteration: Iteration
    table: str
    parts: list[Part]
    metrics: dict[str, Metric]
    """Metrics that the workers had logged of the step by then, merged."""
    position: int | None
    """Number of the dataloader's next prompt, where the step has drawn more prompts than its
    own."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint whose parts are all written."""

    iteration: Iteration
    url: str
    saved: list[Mapping[str, Any]]
    """Reports of the workers on their parts, in rank order."""
    files: dict[str, FileDigest]
    """Digests of all files by path in the folder, as they were written."""


@dataclass(slots=True)
class PendingIteration:
    """An iteration in progress, and the metrics of the workers that have completed it."""

    iteration: Iteration
    futures: dict[str, Future[Any]]
    logged: dict[str, dict[str, Metric]] = field(default_factory=dict)


def iterations(
    config: Config,
    phases: Collection[str],
    done: int = 0,
    stages: Iterable[Stage] = (),
    recorded: Collection[tuple[Phase, int]] = (),
) -> Iterator[Iteration]:
    """Yield every iteration of a run in order, after ``done`` steps.

    Validation comes before the first step, every ``validation.every`` steps and after the last; a
    checkpoint every ``checkpoint.every`` steps and after the last; the test at the end. A resumed
    run begins with the weights. It replays steps that have a stage, and leaves out validations
    whose phase and step are in ``recorded``.

    A training step that a validation or a checkpoint follows is a drain, also where the validation
    is left out: nodes with a lag catch up in it, so that these see everything of their step.
    """
    sequence = count()
    steps = config.run.steps
    save_every = config.checkpoint.every
    validate_every = 0
    if Phase.VALIDATION in phases:
        validate_every = config.validation.every
    stage_of_step = {stage.step: stage for stage in stages}
    if Phase.WEIGHTS in phases:
        yield Iteration(Phase.WEIGHTS, done, next(sequence))
    if Phase.VALIDATION in phases and done == 0 and (Phase.VALIDATION, 0) not in recorded:
        yield Iteration(Phase.VALIDATION, 0, next(sequence))
    for step in range(done + 1, steps + 1):
        is_last = step == steps
        validates = _is_due(step, validate_every, is_last)
        saves = _is_due(step, save_every, is_last)
        iteration = Iteration(
            Phase.TRAIN, step, next(sequence), drain=validates or saves or is_last
        )
        stage = stage_of_step.get(step)
        if stage is not None:
            iteration = replace(
                iteration,
                phase=Phase.REPLAY,
                position=stage.position,
                frontier=stage.table,
            )
        yield iteration
        if validates and (Phase.VALIDATION, step) not in recorded:
            yield Iteration(Phase.VALIDATION, step, next(sequence))
        if saves:
            yield Iteration(Phase.CHECKPOINT, step, next(sequence))
    if Phase.TEST in phases:
        yield Iteration(Phase.TEST, steps, next(sequence))


def _is_due(step: int, every: int, is_last: bool) -> bool:
    """Return whether an action is due after ``step``: every ``every`` steps and after the last; if
    ``every`` is 0, never.
    """
    if every == 0:
        return False
    if is_last:
        return True
    return step % every == 0
