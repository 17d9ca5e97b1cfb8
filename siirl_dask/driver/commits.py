"""Commits what all workers have written, and deletes the stages that this makes unnecessary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from siirl_dask.driver.log import RunLog
from siirl_dask.driver.under_way import Staged, Written
from siirl_dask.planner import Cut
from siirl_dask.runs.checkpoint_state import State
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.retention import remove_old_stages
from siirl_dask.runs.stages import describe_stage
from siirl_dask.runs.tables import commit_table, remove_step

logger = logging.getLogger("siirl_dask.driver")


@dataclass(slots=True)
class Commits:
    """Commits tables of steps, and checkpoints, for one try of a run."""

    checkpoints: Checkpoints
    log: RunLog
    digest: str
    """Digest of the run's identity, which the records carry."""
    cuts: Mapping[str, Cut]
    """The DAG of a step that goes on from a table, by table; no step can go on from the others."""
    kept: Sequence[str] = ()
    """Tables of what nodes keep for later steps."""
    _spent: set[tuple[int, str]] = field(default_factory=set)
    """Steps and tables of stages that are not needed any more, and that workers may still be writing."""
    _whole: set[tuple[int, str]] = field(default_factory=set)
    """Steps and tables that every worker has written."""
    _there: dict[int, set[str]] = field(default_factory=dict)
    """Tables of recent steps that are committed, where nodes keep rows for later steps."""

    def commit(self, written: Staged | Written) -> None:
        """Commit a table of a step, or a checkpoint. Fenced if another start has taken the run over."""
        if isinstance(written, Written):
            self._commit_checkpoint(written)
        else:
            self._commit_table(written)

    def _commit_table(self, staged: Staged) -> None:
        attempt, step, table = self.log.attempt, staged.iteration.step, staged.table
        self._whole.add((step, table))
        if (step, table) in self._spent:
            self._remove(step, table)
            return
        spent = self.cuts[table].spent if table in self.cuts else None
        about = describe_stage(
            step=step,
            table=table,
            digest=self.digest,
            attempt=attempt.number,
            metrics=self.log.resume.metrics_before(staged.iteration) | staged.metrics,
            position=staged.position,
            spent=spent,
        )
        commit_table(attempt, table, step, staged.parts, about)
        for earlier in spent or ():
            if self._is_being_written(step, earlier):
                self._spent.add((step, earlier))
            else:
                self._remove(step, earlier)
        self._remove_kept(step, table)

    def _is_being_written(self, step: int, table: str) -> bool:
        """Return whether a worker may still be writing its part: a folder that goes meanwhile would fail the run."""
        replayed_from = {stage.step: stage.table for stage in self.log.resume.stages}.get(step)
        if (step, table) in self._whole or table == replayed_from:
            return False
        if replayed_from is None or replayed_from not in self.cuts:
            return True
        return any(node.stored_as == table for node in self.cuts[replayed_from].dag.nodes)

    def _remove_kept(self, step: int, table: str) -> None:
        """Delete what nodes kept before ``step``, once that step can go on without it and has stored what they keep."""
        if not self.kept:
            return
        there = self._there.setdefault(step, set())
        there.add(table)
        if there.issuperset(self.kept) and not there.isdisjoint(self.cuts):
            for kept in self.kept:
                self._remove(step - 1, kept)
            del self._there[step]

    def _remove(self, step: int, table: str) -> None:
        """Delete a stage. Fenced if another start has taken the run over."""
        try:
            remove_step(self.log.attempt, table, step)
        except OSError as error:  # it costs no run: `siirl-dask clean` finds what stays
            logger.warning("the rows of step %d stay in %s: %s: %s", step, table, type(error).__name__, error)

    def _commit_checkpoint(self, written: Written) -> None:
        log, step = self.log, written.iteration.step
        state = State.of(step, written.saved, metrics=log.metrics_of(step), digest=self.digest)
        self.checkpoints.commit(written.url, state, written.files)
        self._spent = {(later, table) for later, table in self._spent if later > step}
        self._whole = {(later, table) for later, table in self._whole if later > step}
        self._there = {later: tables for later, tables in self._there.items() if later > step}
        remove_old_stages(log.attempt.url, log.config.run.keep_stages)
