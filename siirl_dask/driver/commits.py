"""Commits what all workers have written, and deletes the stages that this makes unnecessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from siirl_dask.driver.log import RunLog
from siirl_dask.driver.under_way import Staged, Written
from siirl_dask.planner import Cut
from siirl_dask.runs.checkpoint_state import State
from siirl_dask.runs.checkpoints import Checkpoints
from siirl_dask.runs.retention import remove_old_stages
from siirl_dask.runs.stages import describe_stage
from siirl_dask.runs.tables import commit_table, remove_step


@dataclass(slots=True)
class Commits:
    """Commits tables of steps, and checkpoints, for one try of a run."""

    checkpoints: Checkpoints
    log: RunLog
    digest: str
    """Digest of the run's identity, which the records carry."""
    cuts: Mapping[str, Cut]
    """What is left of a step that goes on from a table, by table; others are no use to a step that is cut short."""
    _spent: set[tuple[int, str]] = field(default_factory=set)
    """Steps and tables of stages that came to nothing before they were committed."""

    def commit(self, written: Staged | Written) -> None:
        """Commit a table of a step, or a checkpoint. Fenced if another start has taken the run over."""
        if isinstance(written, Written):
            self._commit_checkpoint(written)
        else:
            self._commit_table(written)

    def _commit_table(self, staged: Staged) -> None:
        attempt, step, table = self.log.attempt, staged.iteration.step, staged.table
        if (step, table) in self._spent:
            remove_step(attempt, table, step)
            return
        spent = self.cuts[table].spent if table in self.cuts else None
        about = describe_stage(
            digest=self.digest,
            attempt=attempt.number,
            metrics=self.log.resume.metrics_before(staged.iteration) | staged.metrics,
            position=staged.position,
            spent=spent,
        )
        commit_table(attempt, table, step, staged.parts, about)
        for earlier in spent or ():
            remove_step(attempt, earlier, step)
            self._spent.add((step, earlier))  # a worker without a part of ``table`` may still be writing

    def _commit_checkpoint(self, written: Written) -> None:
        log, step = self.log, written.iteration.step
        state = State.of(step, written.saved, metrics=log.metrics_of(step), digest=self.digest)
        self.checkpoints.commit(written.url, state, written.files)
        self._spent = {(later, table) for later, table in self._spent if later > step}
        remove_old_stages(log.attempt.url, log.config.run.keep_stages)
