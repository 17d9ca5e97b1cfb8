"""Failed rows or episodes of a step: a few may be left out of the loss, more end the run on all workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from siirl_dask.context import Context
from siirl_dask.errors import EpisodeError, Origin, RewardError

logger = logging.getLogger(__name__)
GIVEN_UP = "was given up, since more episodes failed than may"
"""The failure of an episode that was stopped for those of others."""
_LISTED = 3  # of a step that are logged one by one, where they are allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The rows or episodes that failed on this worker."""

    numbers: Sequence[int]
    """The rows or episodes, as indices in a list."""
    describe: Callable[[int], tuple[str, int]]
    """Returns, for one of them, a sentence on what happened, and its row id."""
    given_up: int = 0
    """Others that were given up, since too many had failed before."""


def failed_episodes(failures: Sequence[str | None], describe: Callable[[int], tuple[str, int]]) -> Failed:
    """Return the episodes that failed themselves, of why each of all failed, and how many were given up for them."""
    numbers = [at for at, failure in enumerate(failures) if failure not in (None, GIVEN_UP)]
    return Failed(numbers=numbers, describe=describe, given_up=sum(failure == GIVEN_UP for failure in failures))


def check_failures(
    ctx: Context,
    failed: Failed,
    *,
    most: int,
    key: str,
    whose: str,
    kind: str,
    error: type[RewardError] | type[EpisodeError],
) -> None:
    """Raise ``error`` on all workers when more failed on all of them together than ``most``; log allowed ones.

    A worker whose own failures exceed that has stopped, and still takes part in the sum: its peers, perhaps without
    any, wait there. Where none may fail nobody waits: a worker with failures raises, which ends the run for all.
    ``key`` is the configuration's for ``most``; ``whose`` is what failed, such as ``the environment``, and ``kind``
    what it failed for, such as ``rows``.
    """
    numbers = failed.numbers
    own = [len(numbers), failed.given_up]
    total, given_up = ctx.all_sum(own) if most else own
    if total <= most and not given_up:
        for number in numbers[:_LISTED]:
            logger.warning("left out of the loss: %s", failed.describe(number)[0])
        if len(numbers) > _LISTED:
            logger.warning("step %d: left out of the loss: %d more %s", ctx.step, len(numbers) - _LISTED, kind)
        return
    allowed = f"{key}={most}"
    if not numbers:
        raise error(f"{whose} failed for {total:.0f} {kind} of step {ctx.step} elsewhere ({allowed})")
    told, row_id = failed.describe(numbers[0])
    count = f"; it failed for at least {total:.0f} {kind} of the step ({allowed})" if total > 1 else f" ({allowed})"
    raised = error(told + count)
    raised.origin = Origin(rows=(row_id,))
    raise raised
