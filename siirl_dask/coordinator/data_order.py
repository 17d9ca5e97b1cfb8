"""The global order of a dataset: which row comes at which position of which step, as a pure
function of a seed.

A batch of B prompts is read from B streams. The dataset's row groups are shuffled, rows are
shuffled within each, and the resulting order is cut into B equal ranges: stream j has the prompt at
position j of every step. A worker that owns a range of positions therefore reads one range of row
groups and nothing else, and the rows of a step do not depend on how many workers there are. The
order changes with each epoch; the last step of an epoch is shorter when B does not divide the
dataset, so no row is lost or repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from siirl_dask.tables import Ints, split

KNOWN_ROWS = 2**18
"""Rows whose order is known ahead, over all streams: 2 MiB, however long the dataset is."""
_LEAST_KNOWN = 64  # of one stream: a row group is shuffled, and read, once for so many steps


@dataclass(frozen=True, slots=True)
class RowPosition:
    """Row ``row`` of row group ``group``, which comes at ``position`` of the step's batch."""

    position: int
    group: int
    row: int
    number: int
    """Number of the prompt, from which its stream follows."""
    source: int = 0
    """Number of the table that the row group is of, where there are several."""


class _Window(NamedTuple):
    """The next rows of one stream in one row group."""

    epoch: int
    first: int
    """Index of the first one in the epoch's order."""
    rows: Ints


class GlobalOrder:
    """The order of the rows of a dataset, over all epochs.

    ``sizes`` are the rows of each row group in table order; ``seed`` None keeps the table's order.
    All prompts of all epochs are numbered in this order; a number is a prompt, whichever worker
    reads it.

    It holds a number per row group and the next rows of each stream, nothing per row of the
    dataset.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        batch_size: int,
        seed: int | None,
        known_rows: int = KNOWN_ROWS,
    ) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._seed = seed
        self._rows = int(self._sizes.sum())
        self._streams = split(self._rows, batch_size)
        self.steps_per_epoch = -(-self._rows // batch_size)
        self._epoch = lru_cache(maxsize=2)(self._shuffled_groups)
        # of neighbouring streams, which share a row group
        self._within = lru_cache(maxsize=1)(self._shuffled_rows)
        self._window_rows = max(_LEAST_KNOWN, known_rows // batch_size)
        self._windows: dict[int, _Window] = {}  # by stream

    def prompt_numbers(self, step: int) -> range:
        """Return the numbers of the prompts of global step ``step``, from 0.

        Prompt number q stands in stream ``q % rows % batch_size``.
        """
        epoch, epoch_step = divmod(step, self.steps_per_epoch)
        first = epoch_step * len(self._streams)
        stop = min(first + len(self._streams), self._rows)
        return range(epoch * self._rows + first, epoch * self._rows + stop)

    def worker_rows(self, numbers: range, index: int, count: int) -> list[RowPosition]:
        """Return the rows that worker ``index`` of ``count`` reads of the prompts numbered so:
        those of its streams.
        """
        first, last = split(len(self._streams), count)[index]
        own = (number for number in numbers if first <= self.stream(number) < last)
        return [self.row_position(number, number - numbers.start) for number in own]

    def stream(self, number: int) -> int:
        """Return the stream of prompt ``number``."""
        return number % self._rows % len(self._streams)

    def row_position(self, number: int, position: int) -> RowPosition:
        """Return where prompt number ``number`` lies in the table, as the one at ``position`` of
        its batch.
        """
        group, rows = self._from(number)
        return RowPosition(position, group, int(rows[0]), number)

    def following_rows(self, number: int) -> Ints:
        """Return the next rows that the stream of prompt ``number`` has after it, in order, of
        the same row group.
        """
        _, rows = self._from(number)
        return rows[1:]

    def _from(self, number: int) -> tuple[int, Ints]:
        """Return the row group of prompt ``number``, and rows of it that its stream has from
        there on.
        """
        epoch, within_epoch = divmod(number, self._rows)
        epoch_step, stream = divmod(within_epoch, len(self._streams))
        stream_start, stream_end = self._streams[stream]
        index = stream_start + epoch_step  # in the epoch's order
        groups, starts = self._epoch(epoch)
        slot = int(np.searchsorted(starts, index, side="right")) - 1
        group = int(groups[slot])
        start = int(starts[slot])
        window = self._windows.get(stream)
        if (
            window is None
            or window.epoch != epoch
            or not window.first <= index < window.first + len(window.rows)
        ):
            end = min(index + self._window_rows, stream_end, start + int(self._sizes[group]))
            rows = self._within(epoch, group)[index - start : end - start]
            window = _Window(epoch, first=index, rows=rows.astype(np.int64))
            self._windows[stream] = window
        return group, window.rows[index - window.first :]

    def _shuffled_groups(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the row groups in this epoch's order, and the global index of each one's first
        row.
        """
        groups = np.arange(len(self._sizes))
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch]).shuffle(groups)
        ends = np.cumsum(self._sizes[groups])
        return groups, ends - self._sizes[groups]

    def _shuffled_rows(self, epoch: int, group: int) -> NDArray[np.int32]:
        # the shuffle does not depend on the type
        rows = np.arange(self._sizes[group], dtype=np.int32)
        if self._seed is not None:
            np.random.default_rng([self._seed, epoch, group]).shuffle(rows)
        return rows


# The order of a mixture: which source each prompt is from, by its number, and which row of that
# source.
#
# The sources' weights are the leaves of a tree. At each fork the first n prompts are divided by
# rounding n times the left side's part, so the side of prompt n, and its number there, follow from
# n alone: no random draws, and nothing to replay where a run resumes. After any number of prompts
# each source is within a prompt or two of its exact part. Within a source the order is that of
# ``GlobalOrder``, epoch after epoch, so a short source starts over while a long one goes on.


@dataclass(frozen=True, slots=True)
class _Fork:
    """A fork of the tree of weights, which are whole numbers."""

    left: _Fork | int
    right: _Fork | int
    left_weight: int
    weight: int

    def left_of(self, count: int) -> int:
        """Return how many of the first ``count`` prompts go to the left."""
        return (2 * count * self.left_weight + self.weight) // (2 * self.weight)


class Interleaving:
    """The source of each prompt of a mixture, in exact proportion to ``weights``."""

    def __init__(self, weights: Sequence[Fraction]) -> None:
        scale = lcm(*(weight.denominator for weight in weights))
        whole = [int(weight * scale) for weight in weights]
        self._root = _tree(whole, 0, len(whole))

    def place(self, number: int) -> tuple[int, int]:
        """Return the source of prompt ``number`` of the mixture, and the prompt's number in that
        source.
        """
        branch = self._root
        while not isinstance(branch, int):
            left = branch.left_of(number)
            if branch.left_of(number + 1) > left:
                branch = branch.left
                number = left
            else:
                branch = branch.right
                number -= left
        return branch, number


def _tree(weights: Sequence[int], first: int, stop: int) -> _Fork | int:
    """Return a balanced tree over the sources from ``first`` to before ``stop``."""
    if stop - first == 1:
        return first
    middle = (first + stop) // 2
    return _Fork(
        left=_tree(weights, first, middle),
        right=_tree(weights, middle, stop),
        left_weight=sum(weights[first:middle]),
        weight=sum(weights[first:stop]),
    )


class MixedOrder:
    """The order of the rows of several tables, with the interface of ``GlobalOrder``.

    ``sizes`` are the rows of each row group of each table. A step always has ``batch_size``
    prompts.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        weights: Sequence[Fraction],
        batch_size: int,
        seed: int | None,
    ) -> None:
        self._batch_size = batch_size
        self._interleaving = Interleaving(weights)
        self.streams = _streams(weights, batch_size)
        """Streams of each source: about as many as it has prompts in a step."""
        total = sum(self.streams)
        self._orders = [
            GlobalOrder(groups, streams, seed, KNOWN_ROWS * streams // total)
            for groups, streams in zip(sizes, self.streams, strict=True)
        ]

    def prompt_numbers(self, step: int) -> range:
        """Return the numbers of the prompts of global step ``step``, from 0."""
        return range(step * self._batch_size, (step + 1) * self._batch_size)

    def worker_rows(self, numbers: range, index: int, count: int) -> list[RowPosition]:
        """Return the rows that worker ``index`` of ``count`` reads of the prompts numbered so, by
        position.

        Prompts are sorted by how far their stream is among those of its source, and cut into equal
        parts. A worker so gets of every source what it gets of the step, as sources differ in what
        their prompts cost; and it gets the same streams in every step, but for those at the ends of
        its part: a source's number of prompts changes by one.
        """
        start, stop = split(len(numbers), count)[index]
        own = sorted(sorted(numbers, key=self._line)[start:stop])
        return [self.row_position(number, number - numbers.start) for number in own]

    def row_position(self, number: int, position: int) -> RowPosition:
        """Return where prompt number ``number`` lies, as the one at ``position`` of its batch."""
        source, within = self._interleaving.place(number)
        row = self._orders[source].row_position(within, position)
        return RowPosition(position, row.group, row.row, number=number, source=source)

    def following_rows(self, number: int) -> Ints:
        """Return the next rows that the stream of prompt ``number`` has after it, in order, of
        the same row group.
        """
        source, within = self._interleaving.place(number)
        return self._orders[source].following_rows(within)

    def _line(self, number: int) -> tuple[float, int]:
        """Return the place of a prompt's stream, from 0 to 1, among those of its source."""
        source, within = self._interleaving.place(number)
        return (self._orders[source].stream(within) + 0.5) / self.streams[source], source


def _streams(weights: Sequence[Fraction], batch_size: int) -> list[int]:
    """Return how many of ``batch_size`` streams each source gets by its weight, at least one."""
    exact = [batch_size * weight / sum(weights) for weight in weights]
    streams = [max(1, int(part)) for part in exact]
    rests = [part - int(part) for part in exact]
    by_rest = sorted(range(len(exact)), key=lambda source: -rests[source])
    for source in by_rest[: max(0, batch_size - sum(streams))]:
        streams[source] += 1
    return streams
