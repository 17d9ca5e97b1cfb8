"""Commits what all workers have written, and deletes the stages that this makes unnecessary."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from siirl_dask.driver.iterations import StagedTable, WrittenCheckpoint
from siirl_dask.driver.log import RunLog
from siirl_dask.planner import Cut
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.retention import remove_old_stages
from siirl_dask.runs.stages import describe_stage
from siirl_dask.runs.tables import commit_table, remove_step

logger = logging.getLogger("siirl_dask.driver")


@dataclass(slots=True)
class Commits:
    """Commits tables of steps, and checkpoints, for one launch of a run."""

    checkpoints: Checkpoints
    log: RunLog
    digest: str
    """Digest of the run's identity, which the records carry."""
    cuts: Mapping[str, Cut]
    """The DAG of a step that goes on from a table, by table; no step can go on from the others."""
    state_tables: Sequence[str] = ()
    """Tables of the rows that nodes store for later steps."""
    _obsolete: set[tuple[int, str]] = field(default_factory=set)
    """Steps and tables of stages that are not needed any more, and that workers may still be
    writing."""
    _complete: set[tuple[int, str]] = field(default_factory=set)
    """Steps and tables that every worker has written."""
    _committed: dict[int, set[str]] = field(default_factory=dict)
    """Tables of recent steps that are committed, where nodes store rows for later steps."""

    def commit(self, written: StagedTable | WrittenCheckpoint) -> None:
        """Commit a table of a step, or a checkpoint. Fenced if another start has taken the run
        over.
        """
        if isinstance(written, WrittenCheckpoint):
            self._commit_checkpoint(written)
        else:
            self._commit_table(written)

    def _commit_table(self, staged: StagedTable) -> None:
        attempt = self.log.attempt
        step = staged.iteration.step
        table = staged.table
        self._complete.add((step, table))
        if (step, table) in self._obsolete:
            self._remove(step, table)
            return
        spent = None
        if table in self.cuts:
            spent = self.cuts[table].spent
        record = describe_stage(
            step=step,
            table=table,
            digest=self.digest,
            attempt=attempt.number,
            metrics=self.log.resume.metrics_before(staged.iteration) | staged.metrics,
            position=staged.position,
            spent=spent,
        )
        commit_table(attempt, table, step, staged.parts, record)
        for earlier in spent or ():
            if self._is_being_written(step, earlier):
                self._obsolete.add((step, earlier))
            else:
                self._remove(step, earlier)
        self._remove_old_state(step, table)

    def _is_being_written(self, step: int, table: str) -> bool:
        """Return whether a worker may still be writing its part: a folder that goes meanwhile
        would fail the run.
        """
        replayed_from = {stage.step: stage.table for stage in self.log.resume.stages}.get(step)
        if (step, table) in self._complete or table == replayed_from:
            return False
        if replayed_from is None or replayed_from not in self.cuts:
            return True
        return any(node.stored_as == table for node in self.cuts[replayed_from].dag.nodes)

    def _remove_old_state(self, step: int, table: str) -> None:
        """Delete the rows that nodes stored at the step before ``step``, once ``step`` can go on
        without them.

        That is so when it has committed all state tables and a table from which it can go on.
        """
        if not self.state_tables:
            return
        committed = self._committed.setdefault(step, set())
        committed.add(table)
        if committed.issuperset(self.state_tables) and not committed.isdisjoint(self.cuts):
            for state_table in self.state_tables:
                self._remove(step - 1, state_table)
            del self._committed[step]

    def _remove(self, step: int, table: str) -> None:
        """Delete a stage. Fenced if another start has taken the run over."""
        try:
            remove_step(self.log.attempt, table, step)
        except OSError as error:  # it costs no run: `siirl-dask clean` finds what stays
            logger.warning(
                "the rows of step %d stay in %s: %s: %s", step, table, type(error).__name__, error
            )

    def _commit_checkpoint(self, written: WrittenCheckpoint) -> None:
        log = self.log
        step = written.iteration.step
        state = CheckpointState.of(
            step, written.saved, metrics=log.metrics_of(step), digest=self.digest
        )
        self.checkpoints.commit(written.url, state, written.files)
        self._obsolete = {(later, table) for later, table in self._obsolete if later > step}
        self._complete = {(later, table) for later, table in self._complete if later > step}
        self._committed = {
            later: tables for later, tables in self._committed.items() if later > step
        }
        remove_old_stages(log.attempt.url, log.config.run.keep_stages)
