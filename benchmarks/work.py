"""The work that every system is given: rows change hands once, from the workers that hold them to
those that need them.

Sources hold consecutive blocks of rows with four ragged columns (16 bytes a token). After the
transition destination ``d`` holds the rows with ``uid % destinations == d``, readable in its own
address space. It reads one value of every 4 KB page of them before it says that it is done, so that
memory which is mapped but not there yet is paid for. The first workers are sources and the first
are destinations: of 2 and 4, two are both; where they lie apart, none is. The rows are never
changed.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Values = NDArray[Any]
"""Values of one column: int32 or float32."""

COLUMNS: Mapping[str, type[np.int32 | np.float32]] = {
    "ids": np.int32,
    "mask": np.int32,
    "logp": np.float32,
    "adv": np.float32,
}
BYTES_PER_TOKEN = 16
_VALUES_PER_PAGE = 1024  # 4 KB of 4-byte values
_PERIOD = 50021  # a prime, so that no two rows begin with the same value


@dataclass(frozen=True, slots=True)
class Work:
    """One transition. ``tokens`` is the length of a row, of the longest when they are ragged."""

    rows: int
    tokens: int
    sources: int = 2
    destinations: int = 4
    ragged: bool = False
    """Lengths are drawn uniformly from a tenth of ``tokens`` to ``tokens``."""
    apart: bool = False
    """Destinations are the workers behind the sources, so that every row goes to another worker."""

    def __post_init__(self) -> None:
        for name in ("sources", "destinations"):
            if self.rows % getattr(self, name):
                raise ValueError(
                    f"{self.rows} rows over {getattr(self, name)} {name}: expected equal shares"
                )

    @property
    def targets(self) -> slice:
        """Return which workers are the destinations, in their order."""
        first = self.sources if self.apart else 0
        return slice(first, first + self.destinations)

    @property
    def workers(self) -> int:
        return max(self.sources, self.targets.stop)

    @property
    def lengths(self) -> Ints:
        """Tokens of each row, by uid."""
        if not self.ragged:
            return np.full(self.rows, self.tokens, np.int64)
        share = np.random.default_rng(0).uniform(0.1, 1.0, self.rows)
        return np.maximum(1, (self.tokens * share).astype(np.int64))

    @property
    def payload_bytes(self) -> int:
        return int(self.lengths.sum()) * BYTES_PER_TOKEN

    def uids_of(self, destination: int) -> Ints:
        return np.arange(destination, self.rows, self.destinations)

    def __str__(self) -> str:
        return f"{self.rows} x {self.tokens:,}{' ragged' if self.ragged else ''}"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows back to back: row ``i`` is ``column[offsets[i] : offsets[i + 1]]`` of each column."""

    uids: Ints
    offsets: Ints
    columns: Mapping[str, Values]

    @property
    def arrays(self) -> list[Values]:
        return list(self.columns.values())

    def take(self, positions: Ints) -> Rows:
        """Copies of some rows; views where they lie together."""
        lengths = np.diff(self.offsets)[positions]
        if len(positions) and positions[-1] - positions[0] == len(positions) - 1:
            span = slice(self.offsets[positions[0]], self.offsets[positions[-1] + 1])
            columns = {name: values[span] for name, values in self.columns.items()}
        else:
            spans = [slice(self.offsets[row], self.offsets[row + 1]) for row in positions]
            columns = {
                name: np.concatenate([values[s] for s in spans])
                for name, values in self.columns.items()
            }
        return Rows(self.uids[positions], offsets_of(lengths), columns)

    def share_of(self, destination: int, destinations: int) -> Rows:
        return self.take(np.flatnonzero(self.uids % destinations == destination))


def offsets_of(lengths: Ints) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def make_rows(work: Work, source: int) -> Rows:
    """Return the rows that source ``source`` holds before the transition."""
    share = work.rows // work.sources
    uids = np.arange(source * share, (source + 1) * share)
    offsets = offsets_of(work.lengths[uids])
    ramp = np.arange(offsets[-1]) % _PERIOD + source
    return Rows(
        uids,
        offsets,
        {name: (ramp + i).astype(kind) for i, (name, kind) in enumerate(COLUMNS.items())},
    )


def pad_rows(rows: Rows, width: int) -> dict[str, Values]:
    """Each column as [rows, width], zeros behind the shorter rows: what systems of dense tensors
    need.
    """
    inside = np.arange(width) < np.diff(rows.offsets)[:, None]
    padded: dict[str, Values] = {}
    for name, values in rows.columns.items():
        padded[name] = np.zeros(inside.shape, values.dtype)
        padded[name][inside] = values
    return padded


def touch(arrays: Iterable[Values]) -> int:
    """Read one value of every page."""
    return sum(
        int(array.reshape(-1)[::_VALUES_PER_PAGE].astype(np.int64).sum()) for array in arrays
    )


@dataclass(frozen=True, slots=True)
class Held:
    """Rows that one destination holds, in their order, with a checksum of all bytes of each."""

    uids: tuple[int, ...]
    checksums: tuple[int, ...]

    def __add__(self, other: Held) -> Held:
        return Held(self.uids + other.uids, self.checksums + other.checksums)


def inspect_row(values: Iterable[Values]) -> int:
    """Checksum of one row, column by column."""
    checksum = 0
    for value in values:
        checksum = zlib.crc32(np.ascontiguousarray(value).data, checksum)
    return checksum


def inspect(rows: Rows) -> Held:
    spans = [
        slice(start, stop) for start, stop in zip(rows.offsets[:-1], rows.offsets[1:], strict=True)
    ]
    return Held(
        tuple(rows.uids.tolist()), tuple(inspect_row(v[s] for v in rows.arrays) for s in spans)
    )


def inspect_padded(uids: Ints, columns: Sequence[Sequence[Values]], lengths: Ints) -> Held:
    """Checksum rows that may be padded: only the first ``lengths[uid]`` values of each count."""
    checksums = (
        inspect_row(column[i][: lengths[uid]] for column in columns) for i, uid in enumerate(uids)
    )
    return Held(tuple(uids.tolist()), tuple(checksums))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing the rows that arrived with the oracle."""

    complete: bool
    """Each destination holds one residue class and no two the same; every byte of every row is
    right."""
    in_order: bool
    """Each destination's rows lie by uid."""


class Oracle:
    """The transition done by one process."""

    def __init__(self, work: Work) -> None:
        self.work = work
        held = [inspect(make_rows(work, source)) for source in range(work.sources)]
        self._checksums = {
            u: c for block in held for u, c in zip(block.uids, block.checksums, strict=True)
        }

    def judge(self, held: Sequence[Held]) -> Verdict:
        """Compare with the oracle. A system may choose which destination gets which residue
        class.
        """
        work = self.work
        wanted = {
            tuple(work.uids_of(destination).tolist()) for destination in range(work.destinations)
        }
        found = {tuple(sorted(one.uids)) for one in held}
        right = all(
            self._checksums.get(uid) == checksum
            for one in held
            for uid, checksum in zip(one.uids, one.checksums, strict=True)
        )
        complete = right and len(held) == work.destinations and found == wanted
        return Verdict(complete, all(list(one.uids) == sorted(one.uids) for one in held))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which transition is measured, and how often."""
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument(
        "--tokens", type=int, default=8192, help="per row; of the longest when ragged"
    )
    parser.add_argument(
        "--from",
        type=int,
        default=2,
        dest="sources",
        metavar="N",
        help="workers that hold the rows",
    )
    parser.add_argument(
        "--to", type=int, default=4, dest="destinations", metavar="M", help="workers that get them"
    )
    parser.add_argument(
        "--ragged", action="store_true", help="row lengths uniform in 0.1 to 1 times --tokens"
    )
    parser.add_argument(
        "--apart", action="store_true", help="rows go from the first N to the next M workers"
    )
    parser.add_argument("--n", type=int, default=7, help="timed rounds, after one that warms up")
    parser.add_argument("--tag", default="", help="goes into the JSON as it is")
    parser.add_argument(
        "--json", action="store_true", help="one JSON line per method instead of a table"
    )


def parse_arguments(parser: argparse.ArgumentParser) -> tuple[Work, argparse.Namespace]:
    """The work, and all arguments."""
    given = parser.parse_args()
    try:
        return Work(
            given.rows, given.tokens, given.sources, given.destinations, given.ragged, given.apart
        ), given
    except ValueError as error:
        parser.error(str(error))
