"""Failed rows or episodes of a step: a few may be left out of the loss, more end the run on all
workers; and the place of a row, for errors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pyarrow as pa

from siirl_dask.context import Context
from siirl_dask.errors import EpisodeError, Origin, RewardError
from siirl_dask.schema import DATA_PART, DATA_ROW, ROW_ID

logger = logging.getLogger(__name__)
GIVEN_UP = "was given up, since more episodes failed than may"
"""The failure of an episode that was stopped because too many others had failed."""
_MAX_LOGGED = 3  # allowed failures of a step that are logged one by one


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The rows or episodes that failed on this worker."""

    indices: Sequence[int]
    """Indices of the failed ones in a list of rows or episodes."""
    describe: Callable[[int], tuple[str, int]]
    """Returns, for an index, a sentence on what happened, and the row id."""
    given_up: int = 0
    """Number of others that were stopped because too many had failed before."""


def failed_episodes(
    failures: Sequence[str | None], describe: Callable[[int], tuple[str, int]]
) -> Failures:
    """Return the failures among episodes, given the reason of each one that failed and None for
    the others.
    """
    indices = [index for index, failure in enumerate(failures) if failure not in (None, GIVEN_UP)]
    return Failures(indices=indices, describe=describe, given_up=failures.count(GIVEN_UP))


def check_failures(
    ctx: Context,
    failures: Failures,
    *,
    most: int,
    key: str,
    whose: str,
    kind: str,
    error: type[RewardError] | type[EpisodeError],
) -> None:
    """Raise ``error`` on all workers when over all of them more failed than ``most``; log allowed
    failures.

    A worker whose own failures exceed that has stopped, and still takes part in the sum: its peers
    wait there, perhaps without failures. Where none may fail nobody waits: a worker with failures
    raises, which ends the run for all. ``key`` is the configuration's for ``most``; ``whose`` is
    what failed, such as ``the environment``, and ``kind`` what it failed for, such as ``rows``.
    """
    indices = failures.indices
    counts: Sequence[float] = [len(indices), failures.given_up]
    if most:
        counts = ctx.all_sum(counts)
    total, given_up = counts
    if total <= most and not given_up:
        for index in indices[:_MAX_LOGGED]:
            message, _ = failures.describe(index)
            logger.warning("left out of the loss: %s", message)
        if len(indices) > _MAX_LOGGED:
            logger.warning(
                "step %d: left out of the loss: %d more %s",
                ctx.step,
                len(indices) - _MAX_LOGGED,
                kind,
            )
        return
    allowed = f"{key}={most}"
    if not indices:
        raise error(
            f"{whose} failed for {total:.0f} {kind} of step {ctx.step} elsewhere ({allowed})"
        )
    message, row_id = failures.describe(indices[0])
    if total > 1:
        message += f"; it failed for at least {total:.0f} {kind} of the step ({allowed})"
    else:
        message += f" ({allowed})"
    raised = error(message)
    raised.origin = Origin(rows=(row_id,))
    raise raised


def row_location(ctx: Context, table: pa.Table, row: int) -> str:
    """Return a row's id and step, and its part and row of the dataset if these are known, for an
    error message.
    """
    in_dataset = ""
    if {DATA_PART, DATA_ROW} <= {*table.column_names}:
        in_dataset = f" (row {table[DATA_ROW][row]} of part {table[DATA_PART][row]} of the dataset)"
    return f"row {table[ROW_ID][row]} of step {ctx.step}{in_dataset}"
