"""Writes rows that went wrong beside the run's tables, for people to look at: no other part of a run reads them."""

from __future__ import annotations

import logging

import pyarrow as pa
from siirl_storage import write_part

from siirl_dask.context import Rank
from siirl_dask.coordinator.stored_rows import step_folder
from siirl_dask.planner.node import NONFINITE

logger = logging.getLogger("siirl_dask.worker")


def put_aside(run_url: str, node: str, step: int, rank: Rank, rows: pa.Table) -> str | None:
    """Write ``rows`` as the part of ``rank`` of the table ``nonfinite-NODE`` at ``step``, whole or not at all.

    Returns the step's folder; None where a store takes no part, which must not hide what went wrong with the rows.
    """
    folder = step_folder(run_url, NONFINITE + node, step)
    try:
        write_part(folder, rank.rank, rank.size, rows)
    except Exception as error:  # each store has errors of its own
        logger.warning("rows of step %d are not written to %s: %s: %s", step, folder, type(error).__name__, error)
        return None
    return folder
