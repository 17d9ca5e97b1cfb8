"""Where a step stops sampling, and which groups it takes: by a number of tokens
(``rollout.partial``), by the first groups that are whole (``rollout.window``), or as another run
did (``rollout.ledger``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context
from siirl_dask.errors import DataError, counted
from siirl_dask.nodes.continued.ledger import LedgerRow, LedgerStep, read_ledger_step
from siirl_dask.nodes.continued.row_progress import RowProgress
from siirl_dask.nodes.continued.window import GroupChoice, GroupProgress, choose_groups, groups_left


class HasBudget(Protocol):
    """A row that is being sampled."""

    @property
    def budget_spent(self) -> bool:
        """Whether no more of its tokens may be sampled in this step."""
        ...


class StepRule(Protocol):
    """Decides for the rows that are in play on a worker in a step, by their indices."""

    def budget_of(self, index: int) -> int | None:
        """Return the tokens that the policy may sample of a row in this step; None: any number."""
        ...

    def row_ended(self, index: int) -> None:
        """Take note of a row that has ended."""
        ...

    def has_enough(self, under_way: Collection[HasBudget], *, all_begun: bool) -> bool:
        """Return whether the step is over although rows are ``under_way``; ``all_begun`` says
        that no other waits to begin. Once it is true it stays so.
        """
        ...

    def choose(self, rows: Sequence[RowProgress]) -> GroupChoice:
        """Return the groups that the step takes, once it is over. DataError where they are not
        those of the run that is repeated.
        """
        ...


def rule_of_step(
    ctx: Context,
    rollout: RolloutConfig,
    groups: Sequence[int],
    seeds: Sequence[int],
    rows: Sequence[RowProgress],
) -> StepRule:
    """Return the rule of this step for the rows in play, whose groups and sampling seeds these are.

    DataError, on all workers, where ``rollout.ledger`` has other samples of this step than these.
    """
    if rollout.ledger is not None:
        step = read_ledger_step(ctx, rollout.ledger, seeds, rollout.max_staleness)
        rule = LedgerRule(groups, seeds, rows, step=step, version=ctx.resource.version)
        rule.check_all_there(ctx, rollout.ledger)
        return rule
    if rollout.window:
        left = 0
        if not ctx.drain:
            left = groups_left(rollout.window, ctx.rank.rank, ctx.rank.size)
        return WindowRule(
            groups,
            rows,
            left=left,
            trained_next=ctx.step,
            max_staleness=rollout.max_staleness,
        )
    return BudgetRule(groups, None if ctx.drain else rollout.max_tokens_per_step)


class BudgetRule:
    """Each row gets a number of tokens in a step, or all of them; the step takes the groups
    that are whole then.
    """

    def __init__(self, groups: Sequence[int], budget: int | None) -> None:
        self._groups = groups
        self._budget = budget

    def budget_of(self, index: int) -> int | None:
        return self._budget

    def row_ended(self, index: int) -> None:
        pass

    def has_enough(self, under_way: Collection[HasBudget], *, all_begun: bool) -> bool:
        return False

    def choose(self, rows: Sequence[RowProgress]) -> GroupChoice:
        missing = _missing(self._groups, rows)
        return GroupChoice(frozenset(group for group, count in missing.items() if not count))


class WindowRule:
    """The step is over when all but ``left`` groups are whole, and takes that many."""

    def __init__(
        self,
        groups: Sequence[int],
        rows: Sequence[RowProgress],
        *,
        left: int,
        trained_next: int,
        max_staleness: int,
    ) -> None:
        self._groups = groups
        self._trained_next = trained_next
        self._max_staleness = max_staleness
        self._missing = _missing(groups, rows)
        self._whole_at: dict[int, int] = {}
        for group, count in self._missing.items():
            if not count:
                self._whole_at[group] = len(self._whole_at)
        self._count = len(self._missing) - left

    def budget_of(self, index: int) -> int | None:
        return None

    def row_ended(self, index: int) -> None:
        group = self._groups[index]
        self._missing[group] -= 1
        if not self._missing[group]:
            self._whole_at[group] = len(self._whole_at)

    def has_enough(self, under_way: Collection[HasBudget], *, all_begun: bool) -> bool:
        return len(self._whole_at) >= self._count

    def choose(self, rows: Sequence[RowProgress]) -> GroupChoice:
        oldest: dict[int, int] = {}
        for group, row in zip(self._groups, rows, strict=True):
            for version in row.sampled_versions():
                oldest[group] = min(version, oldest.get(group, version))
        progress = [
            GroupProgress(group, self._whole_at.get(group), oldest.get(group))
            for group in self._missing
        ]
        return choose_groups(
            progress,
            self._count,
            trained_next=self._trained_next,
            max_staleness=self._max_staleness,
        )


class LedgerRule:
    """The step takes the groups that another run's step took, and samples as many tokens of the
    others as the other run had by then.
    """

    def __init__(
        self,
        groups: Sequence[int],
        seeds: Sequence[int],
        rows: Sequence[RowProgress],
        *,
        step: LedgerStep,
        version: int,
    ) -> None:
        self._groups = groups
        self._step = step
        self._rows: dict[int, LedgerRow] = {}
        """Rows of the ledger that this step takes, by index."""
        self._budgets: list[int | None] = []
        for index, (seed, progress) in enumerate(zip(seeds, rows, strict=True)):
            sampled = len(progress.sampled_versions())
            row = step.taken.get(seed)
            if row is not None:
                self._rows[index] = row
                self._budgets.append(None)
            else:
                row = step.later.get(seed)
                budget = 0 if row is None else row.tokens_up_to(version) - sampled
                self._budgets.append(max(budget, 0))
            older = 0 if row is None else row.tokens_up_to(version - 1)
            if sampled < older:
                raise DataError(
                    f"rollout.ledger: the row with sampling_seed={seed} had "
                    f"{counted(older, 'token')} of weights before version {version}, and has "
                    f"{sampled} here: it began again when this run went on after a failure, and "
                    "those weights are gone; begin the repetition again with --fresh"
                )

    def check_all_there(self, ctx: Context, ledger: str) -> None:
        """Raise DataError, on all workers, unless the rows of the step in the ledger are whole
        groups of theirs, and in a drain all of them.
        """
        members = Counter(self._groups)
        taken = Counter(self._groups[index] for index in self._rows)
        whole = sum(count for group, count in taken.items() if count == members[group])
        sums = ctx.all_sum([whole, len(self._groups)])
        found = int(sums[0])
        in_play = int(sums[1])
        if ctx.drain and found != in_play:
            raise DataError(
                f"rollout.ledger={ledger!r} has {found} of {in_play} rows in play in step "
                f"{ctx.step}, and none may go on to the next step: expected a run with the same "
                "run.steps, validation.every and checkpoint.every"
            )
        if found != self._step.rows:
            raise DataError(
                f"rollout.ledger={ledger!r} has {counted(self._step.rows, 'row')} of step "
                f"{ctx.step}, of which {found} are in play here: expected a run of the same data, "
                "run.seed, data.batch_size and rollout"
            )

    def budget_of(self, index: int) -> int | None:
        return self._budgets[index]

    def row_ended(self, index: int) -> None:
        pass

    def has_enough(self, under_way: Collection[HasBudget], *, all_begun: bool) -> bool:
        if not all_begun:
            return False
        return all(row.budget_spent for row in under_way)

    def choose(self, rows: Sequence[RowProgress]) -> GroupChoice:
        for index, row in self._rows.items():
            row.apply_to(rows[index])
        taken = frozenset(self._groups[index] for index in self._rows)
        return GroupChoice(taken)


def _missing(groups: Sequence[int], rows: Sequence[RowProgress]) -> Counter[int]:
    """Return how many rows of each group have not ended."""
    missing: Counter[int] = Counter()
    for group, row in zip(groups, rows, strict=True):
        missing[group] += not row.ended
    return missing
