"""Finds the steps that a resumed run replays: those after its checkpoint whose rows an earlier start has stored."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from distributed import Client
from siirl_storage.files import absolute

from siirl_dask.config import Config
from siirl_dask.coordinator.source import dataset_schema, training_dataset
from siirl_dask.driver.resume import ResumePoint
from siirl_dask.driver.verification import File, damages
from siirl_dask.errors import DataError, PlanError
from siirl_dask.observe import Record, read_metrics
from siirl_dask.planner import DAG, Phase, cut_at_stored
from siirl_dask.runs.folder import RunIdentity
from siirl_dask.runs.stages import Stage, find_stages

logger = logging.getLogger("siirl_dask.driver")


def with_stages(
    config: Config, dag: DAG, resume: ResumePoint, client: Client, members: Mapping[str, str]
) -> ResumePoint:
    """Return ``resume`` with the stages after its checkpoint, as far as each of their files is whole.

    The workers read every file once and compare its digest; the first that is not whole is named in the log.
    """
    if not resume.exists or resume.fresh:
        return resume
    dataset = training_dataset(config.data, config.run.seed)
    try:
        cut = cut_at_stored(dag, dataset_schema(dataset))
    except PlanError as error:
        return replace(resume, note=f"{resume.note}; stored steps are not replayed: {error}")
    found = find_stages(config.run.url, cut.table, resume.done, RunIdentity.of(config, dag).digest())
    stages = _whole([stage for stage in found if stage.step <= config.run.steps], config, client, members)
    if not stages:
        return resume
    first, last = stages[0].step, stages[-1].step
    named = f"step {first}" if first == last else f"steps {first} to {last}"
    before = resume.note if resume.found is not None else f"no checkpoint in {config.run.url}"
    note = f"{before}; {named} are replayed from stored rows: no row of them is generated again"
    return replace(resume, note=note, cut=cut, stages=tuple(stages), measured=_measured(config.run.url, last))


def _whole(stages: Sequence[Stage], config: Config, client: Client, members: Mapping[str, str]) -> list[Stage]:
    """Return the stages before the first with a file that is not as it was written."""
    files = [File(absolute(stage.url), name, written) for stage in stages for name, written in stage.files.items()]
    found = iter(damages(client, members, files, config.cluster.stall_timeout))
    for number, stage in enumerate(stages):
        if damage := next(filter(None, [next(found) for _ in stage.files]), ""):
            logger.warning("the rows of step %d are generated again: %s", stage.step, damage)
            return list(stages[:number])
    return list(stages)


def _measured(url: str, last: int) -> dict[tuple[Phase, int], Record]:
    """Return the records of steps up to ``last``, by phase and step."""
    try:
        records = read_metrics(url)
    except DataError:
        return {}  # the start ended before it had logged a step
    return {(record["phase"], record["step"]): record for record in records if record["step"] <= last}
