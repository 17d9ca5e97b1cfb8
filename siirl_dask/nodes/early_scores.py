"""Rewards of rows that are finished while others are generated."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from siirl_dask.rewards import PASSED_IF_NAMED, Score, Scorer, Scoring
from siirl_dask.schema import ROW_ID

logger = logging.getLogger(__name__)


class EarlyScores:
    """A RowWork: scores rows as they are finished, in other threads than the one that generates
    rows.
    """

    def __init__(self, scorer: Scorer, names: Sequence[str]) -> None:
        """``names`` are the arguments of the reward function."""
        self._names = names
        self._scoring: Scoring = scorer.begin()
        self._begun: dict[int, pa.Table] = {}
        """The rows whose scoring has begun, by their ids."""
        self._finished = False

    def take(self, rows: pa.Table) -> None:
        """Begin to score rows. Any thread may call it."""
        there = rows.column_names
        names = [name for name in self._names if name in there or name not in PASSED_IF_NAMED]
        # the node's own ``reads`` leave out an argument
        if not {*names} <= {*there}:
            return
        for at, row_id in enumerate(rows[ROW_ID].to_pylist()):
            row = rows.select(names).slice(at, 1)
            self._begun[row_id] = row
            self._scoring.add(row_id, partial(_arguments_of, row))

    @property
    def done(self) -> int:
        """Number of rows that have their score."""
        return self._scoring.done

    def finish(self, row_ids: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[Score] | None:
        """Return one score for each of ``rows``, which are the arguments of all rows; the others
        are scored now.

        None where a row that was scored early has changed since, or is gone: then neither scores
        nor failures count. None as well for a second call.
        """
        if self._finished:  # the node scores twice
            return None
        self._finished = True
        arguments_of_row = dict(zip(row_ids, rows, strict=True))
        for row_id, row in self._begun.items():
            if row_id not in arguments_of_row or _arguments_of(row) != arguments_of_row[row_id]:
                logger.warning(
                    "rows have changed since they were generated: all of them are scored again"
                )
                self.cancel()
                return None
        for row_id, arguments in arguments_of_row.items():
            if row_id not in self._begun:
                self._scoring.add(row_id, partial(dict, arguments))
        scores = self._scoring.finish()
        return [scores.get(row_id, Score()) for row_id in row_ids]

    def cancel(self) -> None:
        """Score no other row, and end the calls that are running."""
        self._scoring.cancel()


def _arguments_of(row: pa.Table) -> dict[str, Any]:
    """Return the columns of a table of one row as arguments."""
    (arguments,) = row.to_pylist()
    return dict(arguments)
