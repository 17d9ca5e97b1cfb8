"""Where a step stops playing, and which groups it takes: by a number of tokens
(``rollout.partial``), by the first groups that are whole (``rollout.window``), or as another run
did (``rollout.ledger``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from siirl_dask.config import RolloutConfig
from siirl_dask.context import Context
from siirl_dask.errors import DataError, counted
from siirl_dask.nodes.episodes.episode_queue import OpenEpisode
from siirl_dask.nodes.episodes.episode_rows import NOT_SAMPLED, PlayedEpisode, PlayedRow
from siirl_dask.nodes.episodes.ledger import LedgerRow, LedgerStep, read_ledger_step
from siirl_dask.nodes.episodes.window import GroupChoice, GroupProgress, choose_groups, groups_left

State = OpenEpisode | PlayedEpisode | None
"""An episode that continues, one that has ended, or None for one that has not begun."""


class StepRule(Protocol):
    """Decides for the episodes that are in play on a worker in a step, by their indices."""

    def budget_of(self, index: int) -> int | None:
        """Return the tokens that the policy may sample of an episode in this step; None: any
        number.
        """
        ...

    def episode_ended(self, index: int) -> None:
        """Take note of an episode that has ended."""
        ...

    def has_enough(self, opened: Collection[OpenEpisode], *, all_begun: bool) -> bool:
        """Return whether the step is over although episodes are ``opened``; ``all_begun`` says
        that no other waits to begin.
        """
        ...

    def choose(self, states: Sequence[State]) -> GroupChoice:
        """Return the groups that the step takes, once it is over. DataError where they are not
        those of the run that is repeated.
        """
        ...


def rule_of_step(
    ctx: Context,
    rollout: RolloutConfig,
    groups: Sequence[int],
    seeds: Sequence[int],
    states: Sequence[State],
) -> StepRule:
    """Return the rule of this step for the episodes in play, whose groups and sampling seeds these
    are.

    DataError, on all workers, where ``rollout.ledger`` has other samples of this step than these.
    """
    if rollout.ledger is not None:
        step = read_ledger_step(ctx, rollout.ledger, seeds, rollout.max_staleness)
        rule = LedgerRule(groups, seeds, states, step=step, version=ctx.resource.version)
        rule.check_all_there(ctx, rollout.ledger)
        return rule
    if rollout.window:
        left = 0
        if not ctx.drain:
            left = groups_left(rollout.window, ctx.rank.rank, ctx.rank.size)
        return WindowRule(
            groups, states, left=left, trained_next=ctx.step, max_staleness=rollout.max_staleness
        )
    return BudgetRule(groups, None if ctx.drain else rollout.max_tokens_per_step)


class BudgetRule:
    """Each episode gets a number of tokens in a step, or all of them; the step takes the groups
    that are whole then.
    """

    def __init__(self, groups: Sequence[int], budget: int | None) -> None:
        self._groups = groups
        self._budget = budget

    def budget_of(self, index: int) -> int | None:
        return self._budget

    def episode_ended(self, index: int) -> None:
        pass

    def has_enough(self, opened: Collection[OpenEpisode], *, all_begun: bool) -> bool:
        return False

    def choose(self, states: Sequence[State]) -> GroupChoice:
        missing = _missing(self._groups, states)
        return GroupChoice(frozenset(group for group, count in missing.items() if not count))


class WindowRule:
    """The step is over when all but ``left`` groups are whole, and takes that many."""

    def __init__(
        self,
        groups: Sequence[int],
        states: Sequence[State],
        *,
        left: int,
        trained_next: int,
        max_staleness: int,
    ) -> None:
        self._groups = groups
        self._trained_next = trained_next
        self._max_staleness = max_staleness
        self._missing = _missing(groups, states)
        self._whole_at: dict[int, int] = {}
        for group, count in self._missing.items():
            if not count:
                self._whole_at[group] = len(self._whole_at)
        self._count = len(self._missing) - left

    def budget_of(self, index: int) -> int | None:
        return None

    def episode_ended(self, index: int) -> None:
        group = self._groups[index]
        self._missing[group] -= 1
        if not self._missing[group]:
            self._whole_at[group] = len(self._whole_at)

    def has_enough(self, opened: Collection[OpenEpisode], *, all_begun: bool) -> bool:
        return len(self._whole_at) >= self._count

    def choose(self, states: Sequence[State]) -> GroupChoice:
        oldest: dict[int, int] = {}
        for group, state in zip(self._groups, states, strict=True):
            for version in sampled_versions(state):
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
        states: Sequence[State],
        *,
        step: LedgerStep,
        version: int,
    ) -> None:
        self._groups = groups
        self._step = step
        self._rows: dict[int, LedgerRow] = {}
        """Rows of the episodes that this step takes, by index."""
        self._budgets: list[int | None] = []
        for index, (seed, state) in enumerate(zip(seeds, states, strict=True)):
            sampled = len([*sampled_versions(state)])
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
                    f"rollout.ledger: the episode with sampling_seed={seed} had "
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

    def episode_ended(self, index: int) -> None:
        pass

    def has_enough(self, opened: Collection[OpenEpisode], *, all_begun: bool) -> bool:
        if not all_begun:
            return False
        return all(one.episode.budget_spent for one in opened)

    def choose(self, states: Sequence[State]) -> GroupChoice:
        for index, row in self._rows.items():
            state = states[index]
            assert isinstance(state, PlayedEpisode)
            row.apply_to(state.rows[0])
        taken = frozenset(self._groups[index] for index in self._rows)
        return GroupChoice(taken)


def sampled_versions(state: State) -> Iterator[int]:
    """Yield the version of the weights of each token of an episode that the policy has sampled."""
    for row in _rows_of(state):
        for version in row.versions:
            if version != NOT_SAMPLED:
                yield version


def _rows_of(state: State) -> Sequence[PlayedRow]:
    match state:
        case OpenEpisode():
            return state.episode.rows
        case PlayedEpisode():
            return state.rows
    return ()


def _missing(groups: Sequence[int], states: Sequence[State]) -> Counter[int]:
    """Return how many episodes of each group have not ended."""
    missing: Counter[int] = Counter()
    for group, state in zip(groups, states, strict=True):
        missing[group] += not isinstance(state, PlayedEpisode)
    return missing
