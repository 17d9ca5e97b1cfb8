"""Finds the steps that a resumed run replays: those after its checkpoint whose rows an earlier start has stored.

A step may have stored several tables from which it can go on. It goes on from the furthest of them that is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from distributed import Client
from siirl_storage.files import absolute

from siirl_dask.config import Config
from siirl_dask.coordinator.source import dataset_schema, training_dataset
from siirl_dask.driver.resume import ResumePoint
from siirl_dask.driver.verification import File, damages
from siirl_dask.errors import DataError, PlanError
from siirl_dask.observe import Record, read_metrics
from siirl_dask.planner import DAG, Cut, Phase, cuts_at_stored
from siirl_dask.runs.folder import RunIdentity
from siirl_dask.runs.stages import Stage, find_stage, find_stages
from siirl_dask.runs.tables import stored_steps

logger = logging.getLogger("siirl_dask.driver")


def with_stages(
    config: Config, dag: DAG, resume: ResumePoint, client: Client, members: Mapping[str, str]
) -> ResumePoint:
    """Return ``resume`` with the stages after its checkpoint, as far as each step has one of which each file is whole.

    The workers read every file once and compare its digest; a table that is not whole is named in the log.
    """
    if not resume.exists or resume.fresh:
        return resume
    dataset = training_dataset(config.data, config.run.seed)
    try:
        cuts = {cut.table: cut for cut in cuts_at_stored(dag, dataset_schema(dataset))}
    except PlanError as error:
        return replace(resume, note=f"{resume.note}; stored steps are not replayed: {error}")
    search = _Search(config, tuple(cuts), RunIdentity.of(config, dag).digest(), client, members)
    carrying = {node.name: node.kept_as for node in dag.nodes if node.kept_as}
    stages, kept = search.with_kept(search.whole(resume.done), carrying)
    if not stages:
        return resume
    used = {stage.table: cuts[stage.table] for stage in stages}
    there = {table: stored_steps(config.run.url, table) for table in cuts}
    unusable = [
        (stage.step, table)
        for stage in stages
        for table in (*search.before(stage.table), *used[stage.table].spent)
        if stage.step in there.get(table, ())
    ]
    before = resume.note if resume.found is not None else f"no checkpoint in {config.run.url}"
    return replace(
        resume,
        note=f"{before}; {_named(stages, [*cuts], used.values())}",
        cuts=used,
        stages=tuple(stages),
        kept=kept,
        unusable=tuple(unusable),
        measured=_measured(config.run.url, stages[-1].step),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for stages of the run: in ``tables``, those first from which least is left to do."""

    config: Config
    tables: tuple[str, ...]
    digest: str
    client: Client
    members: Mapping[str, str]

    def whole(self, after: int) -> list[Stage]:
        """Return a stage of each step from ``after + 1`` on, up to the first step without a stage that is whole."""
        url, last = self.config.run.url, self.config.run.steps
        found = [stage for stage in find_stages(url, self.tables, after, self.digest) if stage.step <= last]
        chosen: dict[int, Stage | None] = {stage.step: stage for stage in found}
        said: dict[int, list[str]] = {}
        while found:
            damaged = [(stage, text) for stage, text in zip(found, self._damages(found), strict=True) if text]
            found = []
            for stage, damage in damaged:
                nearer = find_stage(url, self._after(stage.table), stage.step, self.digest)
                what = "are generated again" if nearer is None else f"are taken from {nearer.table}"
                said.setdefault(stage.step, []).append(f"the rows of step {stage.step} {what}: {damage}")
                chosen[stage.step] = nearer
                found += [] if nearer is None else [nearer]
        whole = list(takewhile(lambda stage: stage is not None, chosen.values()))
        for text in (text for step in [*chosen][: len(whole) + 1] for text in said.get(step, ())):
            logger.warning("%s", text)
        return [stage for stage in whole if stage is not None]

    def with_kept(self, stages: list[Stage], carrying: Mapping[str, str]) -> tuple[list[Stage], dict[str, str]]:
        """Return the stages up to the last step of which all is whole that nodes had kept for later steps.

        ``carrying`` has the tables of that by node. The second result has the folders of that step.
        """
        known, found = [stage.step for stage in stages], dict[str, str]()
        while stages:
            if (whole := self._kept_after(stages[-1].step, carrying)) is not None:
                found = whole
                break
            stages = stages[:-1]
        if lost := known[len(stages) :]:
            what = ", ".join(f"node {name!r}" for name in carrying)
            logger.warning(
                "the rows of %s are generated again: what %s keeps for later steps is not whole", _span(lost), what
            )
        return stages, found

    def _kept_after(self, step: int, carrying: Mapping[str, str]) -> dict[str, str] | None:
        """Return the folders of what nodes had kept for later steps after ``step``; None if one is not whole."""
        found = [find_stage(self.config.run.url, [table], step, self.digest) for table in carrying.values()]
        whole = [stage for stage in found if stage is not None]
        if len(whole) < len(found) or any(self._damages(whole)):
            return None
        return {name: absolute(stage.url) for name, stage in zip(carrying, whole, strict=True)}

    def before(self, table: str) -> tuple[str, ...]:
        """Return the tables that leave less to do than ``table``."""
        return self.tables[: self.tables.index(table)]

    def _after(self, table: str) -> tuple[str, ...]:
        """Return the tables that leave more to do than ``table``."""
        return self.tables[self.tables.index(table) + 1 :]

    def _damages(self, stages: Sequence[Stage]) -> list[str]:
        """Return what is wrong with each stage, by the first of its files that is not as written; empty if nothing."""
        files = [File(absolute(stage.url), name, written) for stage in stages for name, written in stage.files.items()]
        found = iter(damages(self.client, self.members, files, self.config.cluster.stall_timeout))
        return [next(filter(None, [next(found) for _ in stage.files]), "") for stage in stages]


def _named(stages: Sequence[Stage], tables: Sequence[str], cuts: Iterable[Cut]) -> str:
    """Return a sentence about the steps that are replayed. ``tables`` are those there could be, the furthest first."""
    steps = [stage.step for stage in stages]
    nearer = {table: [stage.step for stage in stages if stage.table == table] for table in tables[1:]}
    where = ", ".join(f"{_span(own)} from {table}" for table, own in nearer.items() if own)
    rest = "what these do not hold" if any(cut.generates for cut in cuts) else "no row of them"
    replayed = f"{_span(steps)} {'is' if len(steps) == 1 else 'are'} replayed from stored rows"
    return f"{replayed}{f' ({where})' if where else ''}: {rest} is generated again"


def _span(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    together = steps[-1] - steps[0] == len(steps) - 1
    return f"steps {steps[0]} to {steps[-1]}" if together else f"steps {', '.join(map(str, steps))}"


def _measured(url: str, last: int) -> dict[tuple[Phase, int], Record]:
    """Return the records of steps up to ``last``, by phase and step."""
    try:
        records = read_metrics(url)
    except DataError:
        return {}  # the start ended before it had logged a step
    return {(record["phase"], record["step"]): record for record in records if record["step"] <= last}
