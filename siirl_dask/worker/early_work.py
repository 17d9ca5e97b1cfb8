"""The work that a node has begun with finished rows of a node above it, on one worker in one iteration.

The node above hands each row over as soon as it has it (``Context.hand_over``), and the work on it goes on beside the
worker's own thread. When the node's turn comes, it finds its work in ``Context.begun`` and does what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from siirl_dask.context import RowWork
from siirl_dask.planner import Run


@dataclass(slots=True)
class EarlyWork:
    """Passes finished rows on to a node's work, until that is cancelled."""

    work: RowWork
    columns: Sequence[str]
    """Columns that the node reads of a row, and its ids."""
    cancelled: bool = False

    @staticmethod
    def begin(run: Run, resource: Any) -> EarlyWork:
        """Begin the work of a node that has none yet. ``resource`` is the object of its role on this worker."""
        begin = run.node.contract.by_row
        assert begin is not None
        assert run.early is not None
        return EarlyWork(begin(resource, **run.node.options), run.early.columns)

    def take(self, rows: pa.Table) -> None:
        """Begin with finished rows. Any thread may call it. Rows that lack a column wait for the node's turn."""
        if not self.cancelled and {*self.columns} <= {*rows.column_names}:
            self.work.take(rows.select(self.columns))

    def __enter__(self) -> RowWork:
        return self.work

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End what is under way, and begin with no more rows."""
        self.cancelled = True
        self.work.cancel()
