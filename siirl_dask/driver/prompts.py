"""Tells of prompts that were dropped: a worker counts its own, and only the driver sees the counts of all."""

from __future__ import annotations

import logging

from siirl_dask.driver.under_way import Done
from siirl_dask.errors import DataError
from siirl_dask.observe import values
from siirl_dask.planner import Phase

logger = logging.getLogger("siirl_dask.driver")


def check_prompts(done: Done, max_prompt_length: int) -> None:
    """Warn, once for all workers, of prompts that were too long, and of an iteration that has no others.

    DataError where that iteration is the run's first training step, the validation before it, or an evaluation. A DAG
    that does not log ``data/prompts`` is not checked.
    """
    metrics, iteration = values(done.metrics), done.iteration
    kept, dropped = metrics.get("data/prompts"), metrics.get("data/dropped_prompts") or 0
    if kept is None or (kept and not dropped):
        return
    too_long = f"longer than data.max_prompt_length={max_prompt_length} tokens"
    if kept:
        logger.warning("%s: dropped %d of %d prompts, which are %s", iteration, dropped, kept + dropped, too_long)
        return
    reason = f"{iteration} has no prompts"
    if dropped:
        reason += f": all {dropped:.0f} are {too_long}, the shortest has {metrics['data/shortest_dropped_prompt']:.0f}"
    first = {Phase.TRAIN: 1, Phase.VALIDATION: 0, Phase.EVALUATION: iteration.step}
    if iteration.step == first.get(iteration.phase):
        raise DataError(f"{reason}; raise data.max_prompt_length, or take a dataset with shorter prompts")
    logger.warning("%s; it is skipped", reason)
