"""Work that a node has begun with finished rows of a parent node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from siirl_dask.context import RowWork
from siirl_dask.planner import RunNode


@dataclass(slots=True)
class EarlyWork:
    """The work that a node has begun with finished rows of a parent node, on one worker in one
    iteration. The parent hands each row over as soon as it is finished (``Context.hand_over``), and
    work on it runs in other threads than the worker's own. When the node itself is called, it finds
    its work in ``Context.begun`` and does the rest.
    """

    work: RowWork
    columns: Sequence[str]
    """Columns that the node reads of a row, and its ids."""
    cancelled: bool = False

    @staticmethod
    def begin(run: RunNode, resource: Any) -> EarlyWork:
        """Begin the work of a node that has none yet. ``resource`` is the object of its role on
        this worker.
        """
        begin = run.node.contract.by_row
        assert begin is not None
        assert run.early is not None
        return EarlyWork(begin(resource, **run.node.options), run.early.columns)

    def take(self, rows: pa.Table) -> None:
        """Begin with finished rows. Any thread may call it. Rows that lack a column wait for the
        node's own call.
        """
        if not self.cancelled and set(self.columns) <= set(rows.column_names):
            self.work.take(rows.select(self.columns))

    def __enter__(self) -> RowWork:
        return self.work

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Cancel the work, and begin with no more rows."""
        self.cancelled = True
        self.work.cancel()
