"""The global order of a dataset: which row stands where in which step, as a pure function of a seed.

A batch of B prompts is read from B streams. The dataset's row groups are shuffled, rows are shuffled within each, and
the resulting order is cut into B equal runs: stream j gives the prompt at position j of every step. A worker that
owns a run of positions therefore reads one run of row groups and nothing else, and what a step holds does not depend
on how many workers there are. The order changes with each epoch; the last step of an epoch is shorter when B does not
divide the dataset, so no row is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from siirl_dask.coordinator.balance import Ints, split


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row lies: row ``row`` of row group ``group``, the row that stands at ``position`` of the step's batch."""

    position: int
    group: int
    row: int


class GlobalOrder:
    """``sizes`` are the rows of each row group in table order; ``seed`` None keeps the table's order."""

    def __init__(self, sizes: Sequence[int], batch_size: int, seed: int | None) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._seed = seed
        self._rows = int(self._sizes.sum())
        self._streams = split(self._rows, batch_size)
        self.steps_per_epoch = -(-self._rows // batch_size)
        self._epoch = lru_cache(maxsize=2)(self._shuffled_groups)
        self._within = lru_cache(maxsize=1024)(self._shuffled_rows)

    def numbers(self, step: int) -> range:
        """The numbers of the prompts of global step ``step`` (from 0): all prompts of all epochs are numbered in order,
        and the one of number q stands in stream ``q % rows % batch_size``.
        """
        epoch, turn = divmod(step, self.steps_per_epoch)
        first = turn * len(self._streams)
        return range(epoch * self._rows + first, epoch * self._rows + min(first + len(self._streams), self._rows))

    def share(self, numbers: range, index: int, count: int) -> list[Place]:
        """The places of worker ``index`` of ``count``, by position in ``numbers``: those in its run of streams."""
        first, last = split(len(self._streams), count)[index]
        mine = (number for number in numbers if first <= number % self._rows % len(self._streams) < last)
        return [self.place(number, number - numbers.start) for number in mine]

    def place(self, number: int, position: int) -> Place:
        """Where the prompt of a number lies, as one that stands at ``position``."""
        epoch, within_epoch = divmod(number, self._rows)
        turn, stream = divmod(within_epoch, len(self._streams))
        groups, starts = self._epoch(epoch)
        at = self._streams[stream][0] + turn
        slot = int(np.searchsorted(starts, at, side="right")) - 1
        group = int(groups[slot])
        return Place(position, group, int(self._within(epoch, group)[at - int(starts[slot])]))

    def _shuffled_groups(self, epoch: int) -> tuple[Ints, Ints]:
        """Row groups in this epoch's order, and the global index of each one's first row."""
        groups = np.arange(len(self._sizes))
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch]).shuffle(groups)
        ends = np.cumsum(self._sizes[groups])
        return groups, ends - self._sizes[groups]

    def _shuffled_rows(self, epoch: int, group: int) -> Ints:
        rows = np.arange(self._sizes[group])
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch, group]).shuffle(rows)
        return rows
