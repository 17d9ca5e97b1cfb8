"""Finds the steps that a resumed run replays: those after its checkpoint whose rows an earlier
start has stored.

A step may have stored several tables from which it can go on. It goes on from the furthest of them
that is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from distributed import Client
from siirl_storage import absolute

from siirl_dask.config import Config
from siirl_dask.coordinator import dataset_schema, training_dataset
from siirl_dask.driver.recovery.resume import ResumePoint
from siirl_dask.driver.recovery.verification import WrittenFile, damages_of
from siirl_dask.errors import DataError, PlanError
from siirl_dask.observe import Record, read_metrics
from siirl_dask.planner import DAG, Cut, Phase, cuts_at_stored
from siirl_dask.runs.folder import known_digests
from siirl_dask.runs.stages import Stage, find_stage, find_stages
from siirl_dask.runs.tables import stored_steps

logger = logging.getLogger("siirl_dask.driver")


def with_stages(
    config: Config,
    dag: DAG,
    resume: ResumePoint,
    client: Client,
    members: Mapping[str, str],
) -> ResumePoint:
    """Return ``resume`` with the stages after its checkpoint, as far as each step has a complete
    one.

    The workers read every file once and compare its digest; a table that is damaged is named in the
    log.
    """
    if not resume.exists or resume.fresh:
        return resume
    dataset = training_dataset(config.data, config.run.seed)
    try:
        cuts = {cut.table: cut for cut in cuts_at_stored(dag, dataset_schema(dataset))}
    except PlanError as error:
        return replace(resume, note=f"{resume.note}; stored steps are not replayed: {error}")
    search = _Search(config, tuple(cuts), known_digests(config, dag), client, members)
    state_tables = {node.name: node.state_table for node in dag.nodes if node.state_table}
    stages, stored_state = search.with_state(search.complete_stages(resume.done), state_tables)
    if not stages:
        return resume
    cuts_used = {stage.table: cuts[stage.table] for stage in stages}
    stored = {table: stored_steps(config.run.url, table) for table in cuts}
    unusable: list[tuple[int, str]] = []
    for stage in stages:
        superseded = (*search.further(stage.table), *cuts_used[stage.table].spent)
        unusable += [
            (stage.step, table) for table in superseded if stage.step in stored.get(table, ())
        ]
    origin = resume.note if resume.checkpoint is not None else f"no checkpoint in {config.run.url}"
    return replace(
        resume,
        note=f"{origin}; {_describe_replay(stages, list(cuts), cuts_used.values())}",
        cuts=cuts_used,
        stages=tuple(stages),
        stored_state=stored_state,
        unusable=tuple(unusable),
        recorded=_records(config.run.url, stages[-1].step),
    )


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for stages of the run: in ``tables``, those first from which least is left to
    do.
    """

    config: Config
    tables: tuple[str, ...]
    digests: Sequence[str]
    client: Client
    members: Mapping[str, str]

    def complete_stages(self, after: int) -> list[Stage]:
        """Return a complete stage of each step from ``after + 1`` on, up to the first step that
        has none.
        """
        url = self.config.run.url
        found = find_stages(url, self.tables, after, self.digests)
        unverified = [stage for stage in found if stage.step <= self.config.run.steps]
        best: dict[int, Stage | None] = {stage.step: stage for stage in unverified}
        warnings: dict[int, list[str]] = {}
        while unverified:
            earlier: list[Stage] = []
            for stage, damage in zip(unverified, self._damages(unverified), strict=True):
                if not damage:
                    continue
                other = find_stage(url, self._earlier(stage.table), stage.step, self.digests)
                best[stage.step] = other
                what = "are generated again"
                if other is not None:
                    earlier.append(other)
                    what = f"are taken from {other.table}"
                warnings.setdefault(stage.step, []).append(
                    f"the rows of step {stage.step} {what}: {damage}"
                )
            unverified = earlier
        complete: list[Stage] = []
        for step, best_stage in best.items():
            for warning in warnings.get(step, ()):
                logger.warning("%s", warning)
            if best_stage is None:
                break
            complete.append(best_stage)
        return complete

    def with_state(
        self, stages: list[Stage], state_tables: Mapping[str, str]
    ) -> tuple[list[Stage], dict[str, str]]:
        """Return the stages up to the last step whose rows that nodes stored for later steps are
        all complete.

        ``state_tables`` has the table of these rows by node. The second result has their folders at
        that step, by node.
        """
        steps = [stage.step for stage in stages]
        folders: dict[str, str] = {}
        while stages:
            found = self._state_after(stages[-1].step, state_tables)
            if found is not None:
                folders = found
                break
            stages = stages[:-1]
        lost = steps[len(stages) :]
        if lost:
            nodes = ", ".join(f"node {name!r}" for name in state_tables)
            logger.warning(
                "the rows of %s are generated again: what %s keeps for later steps is not whole",
                _span(lost),
                nodes,
            )
        return stages, folders

    def _state_after(self, step: int, state_tables: Mapping[str, str]) -> dict[str, str] | None:
        """Return the folders of the rows that nodes had stored after ``step``; None if one is
        not complete.
        """
        found = [
            find_stage(self.config.run.url, [table], step, self.digests)
            for table in state_tables.values()
        ]
        stages = [stage for stage in found if stage is not None]
        if len(stages) < len(found) or any(self._damages(stages)):
            return None
        return {name: absolute(stage.url) for name, stage in zip(state_tables, stages, strict=True)}

    def further(self, table: str) -> tuple[str, ...]:
        """Return the tables that leave less to do than ``table``."""
        return self.tables[: self.tables.index(table)]

    def _earlier(self, table: str) -> tuple[str, ...]:
        """Return the tables that leave more to do than ``table``."""
        return self.tables[self.tables.index(table) + 1 :]

    def _damages(self, stages: Sequence[Stage]) -> list[str]:
        """Return what is wrong with each stage, by the first of its files that is not as
        written; empty if nothing.
        """
        files: list[WrittenFile] = []
        for stage in stages:
            folder = absolute(stage.url)
            files += [WrittenFile(folder, name, digest) for name, digest in stage.files.items()]
        of_files = iter(
            damages_of(self.client, self.members, files, self.config.cluster.stall_timeout)
        )
        damages: list[str] = []
        for stage in stages:
            of_stage = [next(of_files) for _ in stage.files]
            damages.append(next(filter(None, of_stage), ""))
        return damages


def _describe_replay(stages: Sequence[Stage], tables: Sequence[str], cuts: Iterable[Cut]) -> str:
    """Return a sentence about the steps that are replayed. ``tables`` are those there could be,
    the furthest first.
    """
    steps = [stage.step for stage in stages]
    by_table: list[str] = []
    for table in tables[1:]:
        own = [stage.step for stage in stages if stage.table == table]
        if own:
            by_table.append(f"{_span(own)} from {table}")
    where = ""
    if by_table:
        where = f" ({', '.join(by_table)})"
    rest = "no row of them"
    if any(cut.generates for cut in cuts):
        rest = "what these do not hold"
    verb = "are"
    if len(steps) == 1:
        verb = "is"
    return f"{_span(steps)} {verb} replayed from stored rows{where}: {rest} is generated again"


def _span(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"steps {', '.join(map(str, steps))}"


def _records(url: str, last: int) -> dict[tuple[Phase, int], Record]:
    """Return the records of steps up to ``last``, by phase and step."""
    try:
        records = read_metrics(url)
    except DataError:
        return {}  # the start ended before it had logged a step
    return {
        (record["phase"], record["step"]): record for record in records if record["step"] <= last
    }
