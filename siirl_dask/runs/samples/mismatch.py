"""Measures how far the sampling engine's log-probs are from the trainer's: the one question that
reads every token.

The columns are read batch by batch and go into sums and counts, so that no step is in memory as a
whole. Tokens that the policy did not write (``response_mask``) do not count: nobody sampled them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from siirl_storage import CorruptPart, full_name, open_input
from siirl_storage.formats import damage

from siirl_dask.errors import DataError
from siirl_dask.runs.samples.rollouts import Rollouts
from siirl_dask.schema import OLD_LOGPROBS, RESPONSE_MASK, ROLLOUT_LOGPROBS

_RATIOS = (0.5, 0.8, 0.95, 1.05, 1.25, 2.0)
RATIO_BINS = ("<0.5", "0.5-0.8", "0.8-0.95", "0.95-1.05", "1.05-1.25", "1.25-2", ">2")
"""Columns with the share of tokens whose ratio, of trainer to sampler, is in that range."""
_COLUMNS = (ROLLOUT_LOGPROBS, OLD_LOGPROBS)
_BATCH = 128  # rows decoded at once: 64 MiB where each has 64k tokens
_READERS = 4
_EDGES = np.log(np.array(_RATIOS)).astype(np.float32)
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


@dataclass(slots=True)
class _LogprobDifferences:
    """Sums over tokens of the difference of two log-probs."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    ratios: np.ndarray[tuple[int], np.dtype[np.int64]] = field(
        default_factory=lambda: np.zeros(len(RATIO_BINS), np.int64)
    )

    def add(self, difference: Floats) -> None:
        """Add tokens by the log of their ratio, trainer's less sampler's."""
        if difference.size:
            size = np.abs(difference)
            self.tokens += difference.size
            self.total += float(size.sum(dtype=np.float64))
            self.largest = float(np.maximum(self.largest, size.max()))  # keeps a nan
            # a nan is below none
            below = [int(np.count_nonzero(difference < edge)) for edge in _EDGES]
            self.ratios += np.diff(np.array([0, *below, difference.size]))

    def merge(self, other: _LogprobDifferences) -> None:
        """Add another part's tokens."""
        self.tokens += other.tokens
        self.total += other.total
        self.largest = float(np.maximum(self.largest, other.largest))
        self.ratios += other.ratios


def can_mismatch(rollouts: Rollouts) -> bool:
    """Return whether the table has the two columns that ``mismatch`` compares."""
    return set(_COLUMNS) <= set(rollouts.schema.names)


def mismatch(rollouts: Rollouts) -> pa.Table:
    """Return for each step the response ``tokens``, and over them how far the two log-probs lie
    apart.

    ``mean`` and ``largest`` are of the absolute difference; ``RATIO_BINS`` are shares of tokens by
    the ratio of the trainer's probability before the update to the sampler's. DataError where the
    table lacks one of the two.
    """
    if not can_mismatch(rollouts):
        raise DataError(
            f"the table {rollouts.name!r} has not both columns of log-probs, "
            f"{' and '.join(_COLUMNS)}"
        )
    tallies = {step: _LogprobDifferences() for step in rollouts.files}
    parts = [(step, path) for step, paths in rollouts.files.items() for path in paths]
    columns = [*_COLUMNS, *([RESPONSE_MASK] if RESPONSE_MASK in rollouts.schema.names else [])]
    with ThreadPoolExecutor(_READERS) as pool:
        for (step, _), tally in zip(
            parts, pool.map(lambda part: _tally(rollouts.fs, part[1], columns), parts), strict=True
        ):
            tallies[step].merge(tally)
    rows = [tally for tally in tallies.values() if tally.tokens]
    shares = np.array([tally.ratios / tally.tokens for tally in rows]).reshape(
        len(rows), len(RATIO_BINS)
    )
    return pa.table(
        {
            "step": pa.array([step for step, tally in tallies.items() if tally.tokens], pa.int64()),
            "tokens": pa.array([tally.tokens for tally in rows], pa.int64()),
            "mean": pa.array([tally.total / tally.tokens for tally in rows], pa.float64()),
            "largest": pa.array([tally.largest for tally in rows], pa.float64()),
            **{
                name: pa.array(shares[:, number], pa.float64())
                for number, name in enumerate(RATIO_BINS)
            },
        }
    )


def _tally(fs: AbstractFileSystem, path: str, columns: Sequence[str]) -> _LogprobDifferences:
    tally = _LogprobDifferences()
    try:
        with damage(fs, path):
            for sampler, trainer in _logprobs(fs, path, columns):
                tally.add(trainer - sampler)
    except CorruptPart as error:
        raise DataError(str(error)) from error
    return tally


def _logprobs(
    fs: AbstractFileSystem, path: str, columns: Sequence[str]
) -> Iterator[tuple[Floats, Floats]]:
    """Yield the sampler's and the trainer's log-probs of the policy's tokens, batch after batch
    of rows.
    """
    with open_input(fs, path) as file:
        reader = pq.ParquetFile(file, pre_buffer=False)
        for batch in reader.iter_batches(_BATCH, columns=list(columns), use_threads=False):
            if any(column.null_count for column in batch.columns):
                batch = batch.drop_null()
            lists = [batch.column(name) for name in columns]
            if not all(
                lists[0].value_lengths().equals(other.value_lengths()) for other in lists[1:]
            ):
                raise CorruptPart(
                    full_name(fs, path), f"its columns {', '.join(columns)} have different lengths"
                )
            one, other, *masks = (
                column.flatten().to_numpy(zero_copy_only=False) for column in lists
            )
            yield (one[masks[0]], other[masks[0]]) if masks else (one, other)
