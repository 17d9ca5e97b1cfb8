"""Upper bound of the memory that a worker's tables take along its chain, for readers of a plan.

Rows that are loaded or made in place count as an even share per worker, each row at its longest.
Rows that have moved are balanced by cost: a worker has at most 1.02 of the mean plus one row (or
one group, or one row of each mini-batch). A node's own temporary memory is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from siirl_dask.planner.chain import (
    Chain,
    Drop,
    Edge,
    LoadPrompts,
    Plan,
    Recv,
    Restore,
    RunNode,
    Send,
    Stream,
)
from siirl_dask.planner.column import DATA, Column
from siirl_dask.planner.column_flow import NodeColumns
from siirl_dask.planner.explain.sizes import TableSizes, rows_made, times_of, width_of
from siirl_dask.planner.node import Rows
from siirl_dask.planner.weight_streams import handle_tensors
from siirl_dask.schema import is_blob

_BALANCED = (51, 50)  # 1.02 of the mean, as rows are balanced
_PER_COLUMN = 8  # bytes that an Arrow column takes without rows
# of a streamed table at once on a worker of its source: see worker/weight_stream.py
_SOURCE_PIECES = 4
_TARGET_PIECES = 3  # the same on a worker of its target
# on a worker that makes and takes all of them itself: the next one is made while a row of the last
# is used
_PASSED = 2
_BUFFERS = 2  # of a broadcast at once, on either side: see worker/weight_broadcast.py
_READ = 2  # batches in memory: the step's, and the next one's, which is read ahead


@dataclass(frozen=True, slots=True)
class TableUsage:
    """Bytes of tables on one worker in one step."""

    tables: int
    """Peak bytes of live tables."""
    node: str
    """Node at which the peak occurs."""
    moving: int
    """Bytes published for peers and received from them, in all."""
    unknown: tuple[str, ...]
    """Columns without a bound, which are not counted."""


@dataclass(frozen=True, slots=True)
class _Share:
    """Upper bound of a worker's part of some rows. ``rows`` is None without a bound."""

    made_by: str
    rows: int | None
    tokens: int


def usage(plan: Plan, sizes: TableSizes) -> dict[str, TableUsage]:
    """Return the usage of each worker."""
    weigh = _Weighing(plan, sizes)
    return {worker: _along(chain, weigh) for worker, chain in plan.chains.items()}


def _along(chain: Chain, weigh: _Weighing) -> TableUsage:
    live: dict[str, int] = {}
    peak = 0
    node = ""
    moving = 0
    unknown: dict[str, None] = {}
    for link in chain.flat:
        match link:
            case LoadPrompts(name):
                live[name] = weigh.loaded[name]
            case Recv(edge):
                live[edge.name] = weigh.received[edge.name]
                moving += live[edge.name]
            case RunNode(ran) | Restore(ran):
                now = sum(live.values()) + weigh.made[ran.name]
                if now > peak:
                    peak = now
                    node = ran.name
                live[ran.name] = weigh.outputs[ran.name]
                unknown |= dict.fromkeys(weigh.unknown[ran.name])
            case Stream(source, target, gives):
                now = sum(live.values()) + weigh.streamed(link, chain.worker)
                if now > peak:
                    peak = now
                    node = source.name if gives else target.name
                if gives:
                    unknown |= dict.fromkeys(weigh.unknown[source.name])
            case Send(edge) if edge.moves:
                moving += weigh.sent[edge.name]
            case Drop(table):
                del live[table]
    return TableUsage(peak, node, moving, tuple(unknown))


class _Weighing:
    """Upper bounds of the bytes that each table of a plan takes on one worker."""

    def __init__(self, plan: Plan, sizes: TableSizes) -> None:
        self._plan = plan
        self._sizes = sizes
        self._rows = rows_made(plan, sizes)
        self._longest = max(len(worker.encode()) for worker in plan.chains)
        self._row_tokens = sizes.prompt_tokens + sizes.response_tokens
        self.loaded: dict[str, int] = {}
        self.received: dict[str, int] = {}
        self.made: dict[str, int] = {}
        self.outputs: dict[str, int] = {}
        self.sent: dict[str, int] = {}
        self.unknown: dict[str, tuple[str, ...]] = {}
        into: dict[str, list[Edge]] = {name: [] for name in plan.flow}
        for edge in plan.edges:
            into[edge.target].append(edge)
        shares: dict[str, _Share] = {}
        for name, node_columns in plan.flow.items():
            before = self._share_in(node_columns, into[name], shares)
            shares[name] = self._share_out(node_columns, before)
            self._weigh(node_columns, into[name], before, shares[name])
        for edge in plan.edges:
            waiting = 1 + plan.flow[edge.target].node.lag  # steps whose rows are not yet pulled
            share = shares[edge.source]
            if edge.by_group:
                share = self._one_a_group(share)
            sent = self._bytes(share, edge.schema.names, plan.flow[edge.source].produced)
            self.sent[edge.name] = waiting * sent

    def streamed(self, link: Stream, worker: str) -> int:
        """Return the bytes of a stream's pieces on a worker, or of a broadcast's buffers.

        Tensors that stay on their worker are those of its role: no table of them is made.
        """
        name = link.source.name
        part = self._part(name)
        made = self.made[name]
        if link.edge is None:
            if handle_tensors(link.source, link.target):
                return 0
            return min(made, _PASSED * part)
        if self._sizes.buffers and link.joins:
            total = self._sizes.totals.get(name, made)
            if worker in link.joins:
                return min(total, _BUFFERS * part)
            return 0
        total = 0
        if link.gives:
            total += min(made, _SOURCE_PIECES * part)
        if link.takes:
            total += min(self.received[link.edge.name], _TARGET_PIECES * part)
        return total

    def _part(self, source: str) -> int:
        total = self._sizes.totals.get(source, self.made[source])
        _, largest = self._sizes.pieces.get(source, (0, total))
        if self._sizes.part is None:
            return total
        return max(self._sizes.part, largest)

    def _weigh(
        self,
        node_columns: NodeColumns,
        edges: Iterable[Edge],
        before: _Share,
        after: _Share,
    ) -> None:
        name = node_columns.node.name
        if not node_columns.node.after:
            self.loaded[f"{DATA}->{name}"] = _READ * self._bytes(
                before, node_columns.needed, node_columns.available
            )
        for edge in edges:
            share = before
            if edge.by_group:
                share = self._one_a_group(before)
            self.received[edge.name] = self._bytes(share, edge.schema.names, node_columns.available)
        produced = node_columns.produced
        columns = {}
        for column in (*node_columns.needed, *node_columns.node.contract.writes.names):
            if not _is_sliced(node_columns, column):
                known = produced if column in produced else node_columns.available
                columns[column] = known[column]
        self.made[name] = self._bytes(after, columns, columns)
        shared = node_columns.shared_blobs
        of_rows = [column for column in node_columns.outputs if column not in shared]
        self.outputs[name] = self._bytes(after, of_rows, produced)
        self.outputs[name] += self._bytes(self._one_a_group(after), shared, produced)
        self.unknown[name] = tuple(
            name for name, column in columns.items() if self._unbounded(after, column)
        )

    def _one_a_group(self, share: _Share) -> _Share:
        """Return the share with one row of each group: there are no more groups than prompts."""
        if share.rows is None:
            return share
        return replace(share, rows=min(share.rows, self._sizes.prompts))

    def _share_in(
        self,
        node_columns: NodeColumns,
        edges: list[Edge],
        shares: Mapping[str, _Share],
    ) -> _Share:
        rows = self._rows[node_columns.rows]
        workers = len(self._plan.placement[node_columns.node.role])
        guide = next(
            (edge for edge in edges if edge.source == edge.guide and not edge.by_group), None
        )
        if node_columns.node.after and (guide is None or not guide.moves):
            return shares[guide.source if guide else node_columns.node.after[0]]
        if rows is None:
            return _Share(node_columns.rows, None, 0)
        if guide is None or guide.rows is Rows.REPLICATED or workers == 1:
            own = rows if guide else -(-rows // workers)
            return _Share(node_columns.rows, own, own * self._row_tokens)
        tokens = self._balanced(guide, rows, workers)
        if guide.rows is Rows.ANYWHERE:  # rows on the node's workers stay there
            tokens = max(tokens, shares[guide.source].tokens)
        return _Share(node_columns.rows, rows, tokens)

    def _balanced(self, edge: Edge, rows: int, workers: int) -> int:
        """Return the largest cost of balanced rows on one worker, which bounds their tokens."""
        tokens = self._row_tokens
        start = self._sizes.quadratic_from
        attention = 0
        if start:
            attention = tokens * tokens // start
        cost = max(1, tokens + attention)
        items = 1
        if edge.by_minibatch:
            items = self._sizes.minibatches
        elif edge.rows is Rows.GROUPED:
            items = max(1, rows // max(1, self._sizes.prompts))
        of, per = _BALANCED
        share = -(-of * rows * cost // (per * workers))  # rounded up
        return share + items * cost

    def _share_out(self, node_columns: NodeColumns, before: _Share) -> _Share:
        if not node_columns.node.contract.new_rows:
            return before
        times = times_of(node_columns.node)
        name = node_columns.node.name
        if name in self._sizes.pieces:
            pieces, _ = self._sizes.pieces[name]
            workers = len(self._plan.placement[node_columns.node.role])
            return _Share(name, -(-pieces // workers), 0)
        if before.rows is None or times is None:
            return _Share(name, None, 0)
        rows = before.rows * times
        return _Share(name, rows, rows * self._row_tokens)

    def _bytes(self, share: _Share, names: Iterable[str], columns: Mapping[str, Column]) -> int:
        """Return the bytes of the columns that have a bound."""
        chosen = [columns[name] for name in names]
        total = self._sizes.totals.get(share.made_by)
        if total is not None:
            _, largest = self._sizes.pieces.get(share.made_by, (0, total))
            here = total if share.rows is None else min(total, share.rows * largest)
            if any(column.writer == share.made_by for column in chosen):
                return here
            return 0
        return sum(self._column(share, column) or 0 for column in chosen)

    def _column(self, share: _Share, column: Column) -> int | None:
        width = width_of(column.name, column.type, self._sizes, self._longest)
        if width is None or share.rows is None:
            return None
        tokens = min(share.tokens, share.rows * width.tokens)
        return (
            share.rows * width.fixed
            + -(-tokens * width.bits // 8)
            + -(-share.rows // 8)
            + _PER_COLUMN
        )

    def _unbounded(self, share: _Share, column: Column) -> bool:
        if share.made_by in self._sizes.totals:
            return column.writer != share.made_by
        return self._column(share, column) is None


def _is_sliced(node_columns: NodeColumns, name: str) -> bool:
    """Return whether a column of a node's table has slices of another one, which counts: blobs
    that rows share.
    """
    column = node_columns.available.get(name)
    if column is None or name in node_columns.node.contract.writes.names:
        return False
    if name in node_columns.by_group:
        return True
    if node_columns.node.contract.groups is None or not column.of_groups:
        return False
    return is_blob(column.type)
