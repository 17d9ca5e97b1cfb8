"""The order of a mixture: which source each prompt is from, by its number, and which row of that source.

The sources' weights are the leaves of a tree. At each fork the first n prompts are divided by rounding n times the left
side's part, so the side of prompt n, and its number there, follow from n alone: no random draws, and nothing to replay
where a run resumes. After any number of prompts each source is within a prompt or two of its exact part. Within a
source the order is that of ``GlobalOrder``, epoch after epoch, so a short source starts over while a long one goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from siirl_dask.coordinator.data_order import KNOWN_ROWS, GlobalOrder, RowPosition
from siirl_dask.coordinator.layout.balance import Ints, split


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
        """Return the source of prompt ``number`` of the mixture, and the prompt's number in that source."""
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

    ``sizes`` are the rows of each row group of each table. A step always has ``batch_size`` prompts.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], weights: Sequence[Fraction], batch_size: int, seed: int | None
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
        """Return the rows that worker ``index`` of ``count`` reads of the prompts numbered so, by position.

        Prompts are sorted by how far their stream is among those of its source, and cut into equal parts. A worker so
        gets of every source what it gets of the step, as sources differ in what their prompts cost; and it gets the
        same streams in every step, but for those at the ends of its part: a source's number of prompts changes by one.
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
        """Return the next rows that the stream of prompt ``number`` has after it, in order, of the same row group."""
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
    by_rest = sorted(range(len(exact)), key=lambda source: int(exact[source]) - exact[source])
    for source in by_rest[: max(0, batch_size - sum(streams))]:
        streams[source] += 1
    return streams
