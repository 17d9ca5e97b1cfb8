"""Counts the lengths of texts, in characters or in tokens, exactly and in little memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import pyarrow as pa

Measure = Callable[[Sequence[Any]], list[int]]
"""Returns the length of each prompt: a text, or chat messages."""
_STEPS = (1, 2, 5, 10)
_BINS = 10  # about, beside the one for what is longer than nearly all


class LengthDistribution:
    """The distribution of lengths: how many values have each."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.nulls = 0
        """Values that were null, and have no length."""

    def add(self, lengths: Sequence[int | None]) -> None:
        """Count more values; None counts as a null."""
        self._counts.update(length for length in lengths if length is not None)
        self.nulls += sum(length is None for length in lengths)

    @property
    def count(self) -> int:
        """Number of values that have a length."""
        return self._counts.total()

    def longer_than(self, limit: int) -> int:
        """Return how many values are longer than ``limit``."""
        return sum(count for length, count in self._counts.items() if length > limit)

    def quantile(self, share: float) -> int:
        """Return the least length that ``share`` of the values do not exceed. ValueError if
        there are none.
        """
        if not self._counts:
            raise ValueError("there are no lengths")
        lengths = sorted(self._counts)
        counts = accumulate(self._counts[length] for length in lengths)
        wanted = max(1, math.ceil(share * self.count))
        return next(length for length, seen in zip(lengths, counts, strict=True) if seen >= wanted)

    def bins(self) -> list[tuple[int, int | None, int]]:
        """Return ``(first, last, count)`` of a dozen ranges that cover all lengths; the last range
        may be open.

        Ranges are alike in width up to the length that 99 % do not exceed; what is longer is in
        one.
        """
        if not self._counts:
            return []
        low = self.quantile(0.0)
        high = self.quantile(0.99)
        width = _nice(max(1.0, (high - low + 1) / _BINS))
        start = low // width * width
        edges = list(range(start, high + 1, width))
        ranges: list[tuple[int, int | None]] = [(edge, edge + width - 1) for edge in edges]
        end = edges[-1] + width
        if self.quantile(1.0) >= end:
            ranges.append((end, None))
        return [(first, last, self._between(first, last)) for first, last in ranges]

    def _between(self, first: int, last: int | None) -> int:
        return sum(
            n
            for length, n in self._counts.items()
            if length >= first and (last is None or length <= last)
        )


def characters(prompts: Sequence[Any]) -> list[int]:
    """Return each prompt's number of characters; of chat messages, of all their contents."""
    return [sum(map(len, _texts(prompt))) for prompt in prompts]


def measure_column(column: pa.ChunkedArray, measure: Measure) -> list[int | None]:
    """Return the length of each value of a column of texts or chat messages; None for a null."""
    values = column.to_pylist()
    lengths = iter(measure([value for value in values if value is not None]))
    return [None if value is None else next(lengths) for value in values]


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a prompt: itself, or its messages' contents, which may have parts."""
    match value:
        case str():
            yield value
        case {"content": content}:
            yield from _texts(content)
        case {"text": text}:
            yield from _texts(text)
        case list():
            for one in value:
                yield from _texts(one)


def _nice(width: float) -> int:
    """Return the least of 1, 2, 5, 10, 20, 50, ... that is at least ``width``."""
    unit = 10 ** math.floor(math.log10(width))
    return int(next(unit * step for step in _STEPS if unit * step >= width))
