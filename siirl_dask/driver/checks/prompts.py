"""Warns of prompts that were dropped: a worker counts its own, and only the driver sees the
counts of all.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from siirl_dask.driver.iterations import CompletedIteration
from siirl_dask.errors import DataError
from siirl_dask.observe import values
from siirl_dask.planner import Iteration, Phase

logger = logging.getLogger("siirl_dask.driver")
_PROMPTS = "data/prompts"


def check_prompts(completed: CompletedIteration, max_prompt_length: int) -> None:
    """Warn, once for all workers, of prompts that were too long, and of an iteration that has no
    others.

    DataError where that iteration is the run's first training step, the validation before it, or an
    evaluation. A DAG that does not log ``data/prompts`` is not checked.
    """
    metrics = values(completed.metrics)
    for name in metrics:
        agent, slash, _ = name.removesuffix(_PROMPTS).rpartition("/")
        prefix = f"{agent}{slash}"
        if name == f"{prefix}{_PROMPTS}":
            subject = ""
            if agent:
                subject = f"agent {agent}: "
            _check(completed.iteration, metrics, max_prompt_length, subject=subject, prefix=prefix)


def _check(
    iteration: Iteration,
    metrics: Mapping[str, float | None],
    max_prompt_length: int,
    *,
    subject: str,
    prefix: str,
) -> None:
    used = metrics[f"{prefix}{_PROMPTS}"]
    dropped = metrics.get(f"{prefix}data/dropped_prompts")
    if dropped is None:
        dropped = 0
    if used is None or (used and not dropped):
        return
    too_long = f"longer than data.max_prompt_length={max_prompt_length} tokens"
    if used:
        what = f"dropped {dropped:.0f} of {used + dropped:.0f} prompts, which are {too_long}"
        logger.warning("%s%s: %s", subject, iteration, what)
        return
    reason = f"{subject}{iteration} has no prompts"
    if dropped:
        shortest = metrics[f"{prefix}data/shortest_dropped_prompt"]
        reason += f": all {dropped:.0f} are {too_long}, the shortest has {shortest:.0f}"
    first = {Phase.TRAIN: 1, Phase.VALIDATION: 0, Phase.EVALUATION: iteration.step}
    if iteration.step == first.get(iteration.phase):
        raise DataError(
            f"{reason}; raise data.max_prompt_length, or take a dataset with shorter prompts"
        )
    logger.warning("%s; it is skipped", reason)
