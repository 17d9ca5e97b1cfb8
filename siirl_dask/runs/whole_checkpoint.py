"""Gives a reader a checkpoint of which every file is whole, also while the run goes on and
removes older ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from siirl_dask.errors import CheckpointError
from siirl_dask.runs.checkpoints import Checkpoint, find_checkpoint, find_checkpoints

logger = logging.getLogger("siirl_dask.runs")


def with_whole_checkpoint(
    run_url: str,
    step: int | None,
    roles: Collection[str],
    use: Callable[[Checkpoint], None],
) -> int:
    """Verify the files of ``roles`` in the checkpoint of ``step``, call ``use`` with it, and return
    its step.

    For None it is the newest one. If that is damaged, or removed while it is read, the newest of
    the others is taken, and the log says so. CheckpointError if there is none, or if ``step`` is
    given and cannot be used.
    """
    passed_over: dict[str, str] = {}
    while True:
        found = _newest(run_url, passed_over) if step is None else find_checkpoint(run_url, step)
        try:
            found.verify(roles)
            use(found)
        except CheckpointError as error:
            if step is not None:
                raise CheckpointError(
                    f"the checkpoint of step {step} of {run_url!r} cannot be used: {error}"
                ) from error
            passed_over[found.url] = f"step {found.step}: {error}"
            logger.warning("the checkpoint of step %d is passed over: %s", found.step, error)
        else:
            return found.step


def _newest(run_url: str, passed_over: dict[str, str]) -> Checkpoint:
    """Return the newest checkpoint that is there now and was not passed over."""
    there = [found for found in find_checkpoints(run_url) if found.url not in passed_over]
    if not there:
        reasons = "; ".join(passed_over.values())
        raise CheckpointError(
            f"run {run_url!r} has no checkpoint that can be used ({reasons or 'there is none'})"
        )
    return there[-1]
