"""Compares the rows of a replay with those that the run had stored: what changed, by column and
by sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from siirl_storage import StorageError, join, open_table

from siirl_dask.errors import DataError
from siirl_dask.schema import PROMPT_TEXT, RESPONSE, REWARD, ROW_ID

_STEP = "step"
_SAMPLES = 5  # shown of those whose reward changed most


@dataclass(frozen=True, slots=True)
class ColumnChange:
    """A column's numbers before and after, row by row or token by token."""

    name: str
    values: int
    changed: int
    before: float
    """Mean."""
    after: float
    flipped: int
    """Values that were above 0 and are not, or the other way round."""
    correlation: float | None
    """Pearson's, of before and after; None where one of them does not vary."""


@dataclass(frozen=True, slots=True)
class SampleChange:
    """A sample whose reward is another one."""

    step: int
    row: int
    before: float | None
    after: float | None
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class ReplayChanges:
    """The differences between a replay's rows and the stored ones."""

    table: str
    rows: int
    steps: tuple[int, int]
    """The first step and the last."""
    columns: tuple[ColumnChange, ...]
    samples: tuple[SampleChange, ...]


def compare(run_url: str, table: str, replay: str, columns: Sequence[str]) -> ReplayChanges:
    """Compare ``columns`` of the table ``replay`` with those of ``table``, on the rows that
    ``replay`` has.

    Columns that are not numbers, or lists of numbers, are left out. DataError when rows of one are
    not in the other.
    """
    after = _sorted(run_url, replay, None)
    steps = pc.unique(after[_STEP])
    before = _sorted(run_url, table, steps)
    keys = [_STEP, ROW_ID]
    if not before.select(keys).equals(after.select(keys)):
        raise DataError(
            f"tables {table!r} and {replay!r} of {run_url!r} do not hold the same rows of the same "
            "steps"
        )
    found = [
        _column(name, before[name], after[name]) for name in columns if name in before.column_names
    ]
    shown = tuple(change for change in found if change is not None)
    bounds = pc.min_max(steps).as_py()
    samples = _samples(before, after) if REWARD in columns and REWARD in before.column_names else ()
    return ReplayChanges(replay, after.num_rows, (bounds["min"], bounds["max"]), shown, samples)


def _sorted(run_url: str, table: str, steps: pa.Array | None) -> pa.Table:
    url = join(run_url, table)
    try:
        rows = open_table(url).to_table()
    except StorageError as error:
        raise DataError(f"the rows of {url!r} cannot be read: {error}") from error
    if steps is not None:
        rows = rows.filter(pc.is_in(rows[_STEP], steps))
    return rows.sort_by([(_STEP, "ascending"), (ROW_ID, "ascending")])


def _column(name: str, before: pa.ChunkedArray, after: pa.ChunkedArray) -> ColumnChange | None:
    """Return a column's change; None for one that is not of numbers."""
    if pa.types.is_large_list(before.type) or pa.types.is_list(before.type):
        if not pc.list_value_length(before).equals(pc.list_value_length(after)):
            return None
        before = pc.list_flatten(before)
        after = pc.list_flatten(after)
    if not (pa.types.is_floating(before.type) or pa.types.is_integer(before.type)):
        return None
    old, new = (
        np.asarray(values.cast(pa.float64()).to_numpy(zero_copy_only=False))
        for values in (before, after)
    )
    there = np.isfinite(old) & np.isfinite(new)
    both_nan = np.isnan(old) & np.isnan(new)
    same = (old == new) | both_nan
    before_mean = after_mean = float("nan")
    if there.any():
        before_mean = float(old[there].mean())
        after_mean = float(new[there].mean())
    signs_differ = (old > 0) != (new > 0)
    return ColumnChange(
        name,
        len(old),
        changed=int((~same).sum()),
        before=before_mean,
        after=after_mean,
        flipped=int(signs_differ.sum()),
        correlation=_correlation(old[there], new[there]),
    )


def _correlation(old: NDArray[Any], new: NDArray[Any]) -> float | None:
    """Return Pearson's coefficient of finite numbers; None where one side does not vary."""
    if len(old) < 2 or np.ptp(old) == 0 or np.ptp(new) == 0:
        return None
    return float(np.corrcoef(old, new)[0, 1])


def _samples(before: pa.Table, after: pa.Table) -> tuple[SampleChange, ...]:
    """Return the samples whose rewards differ most, the largest difference first."""
    difference = pc.abs(
        pc.subtract(pc.fill_null(after[REWARD], 0.0), pc.fill_null(before[REWARD], 0.0))
    )
    order = pc.sort_indices(difference, sort_keys=[("", "descending")])
    chosen = pa.array(
        [index for index in order[:_SAMPLES].to_pylist() if difference[index].as_py()], pa.int64()
    )
    texts = [name for name in (PROMPT_TEXT, RESPONSE) if name in before.column_names]
    rows = before.select([_STEP, ROW_ID, REWARD, *texts]).take(chosen).to_pylist()
    news = after[REWARD].take(chosen).to_pylist()
    return tuple(
        SampleChange(
            row[_STEP],
            row[ROW_ID],
            before=row[REWARD],
            after=new,
            prompt=str(row.get(PROMPT_TEXT, "")),
            response=str(row.get(RESPONSE, "")),
        )
        for row, new in zip(rows, news, strict=True)
    )
