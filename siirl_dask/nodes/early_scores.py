"""Scores of finished rows, while others are still generated: what the node ``score`` begins before its turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from siirl_dask.rewards import Score, Scorer
from siirl_dask.rewards.scorer import Scoring
from siirl_dask.schema import ANSWER, PROMPT, RESPONSE, ROW_ID

logger = logging.getLogger(__name__)


def arguments(columns: Sequence[str]) -> list[str]:
    """Return the names of a reward function's arguments, where it also gets ``columns``."""
    return [*dict.fromkeys([PROMPT, RESPONSE, ANSWER, *columns])]


class EarlyScores:
    """A RowWork: scores rows as they are finished, beside the thread that makes others."""

    def __init__(self, scorer: Scorer, names: Sequence[str]) -> None:
        """``names`` are the arguments of the reward function."""
        self._names = names
        self._scoring: Scoring = scorer.begin()
        self._taken: dict[int, pa.Table] = {}
        self._finished = False

    def take(self, rows: pa.Table) -> None:
        """Begin to score rows. Any thread may call it."""
        if not {*self._names} <= {*rows.column_names}:  # the node's own ``reads`` leave out an argument
            return
        for at, row_id in enumerate(rows[ROW_ID].to_pylist()):
            row = self._taken[row_id] = rows.select(self._names).slice(at, 1)
            self._scoring.add(row_id, partial(_as_arguments, row))

    @property
    def done(self) -> int:
        """Number of rows that have their score."""
        return self._scoring.done

    def finish(self, row_ids: Sequence[int], rows: Sequence[dict[str, Any]]) -> list[Score] | None:
        """Return one score for each of all rows, those included that were not taken before.

        None where a row that was taken is another one now, or is gone: then no score counts, nor does a failure. None
        as well when it is called again.
        """
        if self._finished:  # the node scores twice
            return None
        self._finished = True
        places = {row_id: at for at, row_id in enumerate(row_ids)}
        for row_id, row in self._taken.items():
            if row_id not in places or _as_arguments(row) != rows[places[row_id]]:
                logger.warning("rows have changed since they were generated: all of them are scored again")
                self.cancel()
                return None
        for row_id in row_ids:
            if row_id not in self._taken:
                self._scoring.add(row_id, partial(rows.__getitem__, places[row_id]))
        scores = self._scoring.finish()
        return [scores.get(row_id, Score()) for row_id in row_ids]

    def cancel(self) -> None:
        """Score no other row, and end the calls that are under way."""
        self._scoring.cancel()


def _as_arguments(row: pa.Table) -> dict[str, Any]:
    (given,) = row.to_pylist()
    return dict(given)
