"""Rows that leave their node before it is done: they travel along edges, and other nodes begin with
them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from siirl_dask.context import RowWork
from siirl_dask.errors import NodeError
from siirl_dask.planner import Chain, Edge, Iteration, Node, Recv, RunNode, Send
from siirl_dask.schema import GROUP_ID, ROW_ID

if TYPE_CHECKING:
    from siirl_dask.worker.executor import WorkerRuntime


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


@dataclass(frozen=True, slots=True)
class FinishedRows:
    """A worker's rows that go on while their node makes others, in one iteration."""

    runtime: WorkerRuntime
    iteration: Iteration
    edges: Mapping[str, Sequence[Edge]]
    """Edges along which rows can leave this worker before their node is done, by the node."""
    nodes: Mapping[str, Sequence[RunNode]]
    """Links of nodes that begin with finished rows of another node, by that node's name."""
    work: dict[str, EarlyWork] = field(default_factory=dict)
    """Work of nodes that have begun with finished rows and whose own call is still to come, by
    node."""

    @staticmethod
    def of_chain(chain: Chain, runtime: WorkerRuntime, iteration: Iteration) -> FinishedRows:
        """Prefetch rows that sources hand over early, and find the edges and nodes that take this
        worker's own early rows.
        """
        databuffer = runtime.databuffer
        edges: dict[str, list[Edge]] = {}
        nodes: dict[str, list[RunNode]] = {}
        prefetched: list[Edge] = []
        for link in chain.flat:
            match link:
                case Send(edge) if edge.early and databuffer.leaves_early(edge):
                    edges.setdefault(edge.early.node, []).append(edge)
                case RunNode(early=early) if early:
                    nodes.setdefault(early.node, []).append(link)
                case Recv(edge) if edge.early:
                    prefetched.append(edge)
        if prefetched:
            runtime.loop.call_soon_threadsafe(databuffer.prefetch, prefetched, iteration)
        return FinishedRows(runtime, iteration, edges, nodes)

    def hand_over(self, node: Node) -> Callable[[pa.Table], None] | None:
        """Return the ``Context.hand_over`` of a node; None where no edge and no other node of this
        worker can take its rows early.
        """
        edges = self.edges.get(node.name, ())
        works = []
        for run in self.nodes.get(node.name, ()):
            work = EarlyWork.begin(run, self.runtime.resources.get(run.node.role))
            self.work[run.node.name] = work
            works.append(work)
        if not edges and not works:
            return None
        return partial(self._hand_over, node, edges, works)

    def begun(self, node: Node) -> AbstractContextManager[RowWork | None]:
        """Enter the work that a node has begun with finished rows, None for one that has not; it is
        cancelled on the way out.
        """
        return self.work.pop(node.name, nullcontext())

    def cancel(self) -> None:
        """Cancel the work of nodes that are never called."""
        for work in self.work.values():
            work.cancel()

    def _hand_over(
        self,
        node: Node,
        edges: Sequence[Edge],
        works: Sequence[EarlyWork],
        rows: pa.Table,
    ) -> None:
        """Send finished rows along ``edges``, and begin ``works`` with them. NodeError where a
        column that the node declares is missing.
        """
        early = node.contract.early
        expected = (ROW_ID, GROUP_ID, *early)
        missing = [name for name in expected if name not in rows.column_names]
        if missing:
            raise NodeError(
                f"node {node.name!r} handed over rows without {missing}: it declares "
                f"early={list(early)}"
            )
        databuffer = self.runtime.databuffer
        for edge in edges:
            self.runtime.loop.call_soon_threadsafe(databuffer.hand_over, edge, self.iteration, rows)
        for work in works:
            work.take(rows)
