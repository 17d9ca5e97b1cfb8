"""Tells of prompts that were dropped: a worker counts its own, and only the driver sees the counts of all."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from siirl_dask.driver.under_way import Done
from siirl_dask.errors import DataError
from siirl_dask.observe import values
from siirl_dask.planner import Iteration, Phase

logger = logging.getLogger("siirl_dask.driver")
_PROMPTS = "data/prompts"


def check_prompts(done: Done, max_prompt_length: int) -> None:
    """Warn, once for all workers, of prompts that were too long, and of an iteration that has no others.

    DataError where that iteration is the run's first training step, the validation before it, or an evaluation. A DAG
    that does not log ``data/prompts`` is not checked.
    """
    metrics = values(done.metrics)
    for name in metrics:
        agent, slash, _ = name.removesuffix(_PROMPTS).rpartition("/")
        if name == f"{agent}{slash}{_PROMPTS}":
            _check(done.iteration, f"agent {agent}: " if agent else "", metrics, f"{agent}{slash}", max_prompt_length)


def _check(
    iteration: Iteration, whose: str, metrics: Mapping[str, float | None], prefix: str, max_prompt_length: int
) -> None:
    kept, dropped = metrics[f"{prefix}{_PROMPTS}"], metrics.get(f"{prefix}data/dropped_prompts") or 0
    if kept is None or (kept and not dropped):
        return
    too_long = f"longer than data.max_prompt_length={max_prompt_length} tokens"
    if kept:
        text = "%s%s: dropped %d of %d prompts, which are %s"
        logger.warning(text, whose, iteration, dropped, kept + dropped, too_long)
        return
    reason = f"{whose}{iteration} has no prompts"
    if dropped:
        shortest = metrics[f"{prefix}data/shortest_dropped_prompt"]
        reason += f": all {dropped:.0f} are {too_long}, the shortest has {shortest:.0f}"
    first = {Phase.TRAIN: 1, Phase.VALIDATION: 0, Phase.EVALUATION: iteration.step}
    if iteration.step == first.get(iteration.phase):
        raise DataError(f"{reason}; raise data.max_prompt_length, or take a dataset with shorter prompts")
    logger.warning("%s; it is skipped", reason)
