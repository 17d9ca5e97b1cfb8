"""Which groups of rows a step takes, of those that are in play: the first that are whole
(``rollout.window``).

A worker decides alone, on its own groups. It leaves a fixed number of them to the next step, so
that each step but the first and those that drain has as many rows as prompts came in, on any
number of workers. Async RL with such a bound: AReaL, arXiv:2505.24298.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from siirl_dask.tables import split


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The progress of a group's rows at the end of a step."""

    group: int
    whole_at: int | None
    """Place in the order in which groups became whole; None where a row has not ended."""
    oldest_version: int | None
    """Oldest version of the weights that sampled a token of it; None where none did."""


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """Groups that a step takes, and those that are dropped; all others go on in the next step."""

    taken: frozenset[int]
    dropped: frozenset[int] = frozenset()


def groups_left(window: int, rank: int, workers: int) -> int:
    """Return how many of the ``window`` groups the worker of this rank leaves to the next step."""
    start, stop = split(window, workers)[rank]
    return stop - start


def choose_groups(
    groups: Iterable[GroupProgress],
    count: int,
    *,
    trained_next: int,
    max_staleness: int,
) -> GroupChoice:
    """Return ``count`` groups that are whole, or all that are, by the age of their oldest token
    and then in the order in which they became whole; and those that the next step could not train.

    ``trained_next`` is the version of the weights that the next step trains: it may take tokens of
    weights at most ``max_staleness`` older.
    """

    def place(group: GroupProgress) -> tuple[int, int]:
        version = trained_next if group.oldest_version is None else group.oldest_version
        assert group.whole_at is not None
        return version, group.whole_at

    in_play = list(groups)
    whole = sorted((group for group in in_play if group.whole_at is not None), key=place)
    taken = frozenset(group.group for group in whole[: max(count, 0)])
    dropped: list[int] = []
    for group in in_play:
        if group.group in taken or group.oldest_version is None:
            continue
        if trained_next - group.oldest_version > max_staleness:
            dropped.append(group.group)
    return GroupChoice(taken, frozenset(dropped))
