"""Calls a node's function: makes its context, joins its inputs, checks its output against its contract."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from siirl_dask.context import Context, Metric, Rank
from siirl_dask.coordinator.blobs import rows_at, with_values_of_groups
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.errors import NodeError, Origin
from siirl_dask.planner import Edge, Groups, Input, Iteration, Load, Node, Run
from siirl_dask.schema import GROUP_ID, IDENTITY, ROW_ID, TYPES, make_schema
from siirl_dask.worker.early_work import EarlyWork
from siirl_dask.worker.named_errors import named_errors
from siirl_dask.worker.pulse import NODE
from siirl_dask.worker.put_aside import put_aside
from siirl_dask.worker.runtime import WorkerRuntime
from siirl_dask.worker.stages import SoFar


@dataclass(slots=True)
class NodeCalls:
    """Calls the nodes of one pass through a chain, and holds the tables and metrics that they share."""

    runtime: WorkerRuntime
    iteration: Iteration
    loader: Dataloader | None
    """None where the chain loads no prompts."""
    tables: dict[str, pa.Table] = field(default_factory=dict)
    """Live tables by the name of a node or of an edge."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics logged so far."""
    handing: Mapping[str, Sequence[Edge]] = field(default_factory=dict)
    """Edges whose rows can leave this worker early, by the node that hands them over."""
    beginning: Mapping[str, Sequence[Run]] = field(default_factory=dict)
    """Nodes that begin with finished rows of another, by that one's name."""
    begun: dict[str, EarlyWork] = field(default_factory=dict)
    """The work that nodes have begun whose turn is still to come, by their names."""
    reloaded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Roles that get new weights after a node, before anything else asks for them, by the node."""
    loaded: Load | None = None
    """The link that read this worker's prompts; a node that draws more prompts continues from it."""

    def call(self, node: Node, inputs: Sequence[Input], columns: Sequence[str]) -> pa.Table:
        """Run the node's function and return ``columns`` of its output. NodeError when it breaks its contract."""
        with self.named(node):
            table, context = self.joined(inputs), self._handing(self.context_of(node), node)
            profile = self.runtime.profiling.of(node, self.iteration, context.rank)
            with profile, self.begun.pop(node.name, nullcontext()) as context.begun:
                return checked(node, columns, table, node.fn(context, table))

    def cancel_begun(self) -> None:
        """End what nodes have begun that never get their turn."""
        for begun in self.begun.values():
            begun.cancel()

    def kept(self, node: Node) -> pa.Table:
        """Return what a node keeps for later steps on this worker. NodeError when it does not give a table of rows."""
        carries = node.contract.carries
        assert carries is not None
        with self.named(node):
            rows = carries.pack(self.context_of(node), **node.options)
            if not isinstance(rows, pa.Table) or not {ROW_ID, GROUP_ID} <= {*rows.column_names}:
                raise NodeError(f"node {node.name!r} packed no table with {ROW_ID} and {GROUP_ID} of what it keeps")
            return rows

    def so_far(self) -> SoFar:
        """Return what a table that is saved now stands for, beside its rows."""
        return SoFar(self.metrics, self.loader.position if self.loader else None)

    def joined(self, inputs: Sequence[Input]) -> pa.Table:
        """Return one table with the columns of all inputs, sorted by row id; what rows share is not copied."""
        table = _join([self.tables[item.table].select(item.columns) for item in inputs if not item.by_group])
        for item in inputs:
            if item.by_group:
                names = [name for name in item.columns if name not in IDENTITY]
                table = with_values_of_groups(table, self.tables[item.table], names, item.table)
        return table

    def context(self, role: str) -> Context:
        """Return a context for ``role``; an empty name gives one without resource and peers."""
        runtime = self.runtime
        context = Context(
            step=self.iteration.step,
            drain=self.iteration.drain,
            run_seed=runtime.run_seed,
            rank=runtime.ranks.get(role, Rank()),
            device=runtime.device,
            resource=runtime.resources.get(role),
            resources=runtime.resources,
            metrics=self.metrics,
            check_stop=runtime.stop.check,
            overlap=runtime.overlap,
            skip_nonfinite=runtime.skip_nonfinite,
        )
        if role in runtime.peers:
            context.peers = runtime.peers[role]
        return context

    def context_of(self, node: Node) -> Context:
        """Return the context that the node's function is called with."""
        context, load = self.context(node.role), self.loaded
        context.agent, context.node = node.agent, node.name
        named = f"{self.iteration.phase.counts_as}/{node.name}"
        context.state = self.runtime.node_state.setdefault(named, {})
        context.put_aside = partial(put_aside, self.runtime.run_url, node.name, self.iteration.step, context.rank)
        context.reloaded = self.reloaded.get(node.name, frozenset())
        if self.runtime.share_work is not None and context.rank.size > 1:
            context.steal_from_peers = partial(self.runtime.share_work, self.iteration, node)
        if node.contract.draws and load is not None and self.loader is not None:
            context.draw_prompts = partial(
                self.loader.draw_prompts, columns=load.columns, index=load.index, count=load.count
            )
        return context

    def _handing(self, context: Context, node: Node) -> Context:
        """Let the node hand over its rows, where edges can take them early or another node on this worker can."""
        edges = self.handing.get(node.name, ())
        begun = []
        for run in self.beginning.get(node.name, ()):
            work = self.begun[run.node.name] = EarlyWork.begin(run, self.context(run.node.role).resource)
            begun.append(work)
        if edges or begun:
            context.hand_over = partial(self._hand_over, node, edges, begun)
        return context

    def _hand_over(self, node: Node, edges: Sequence[Edge], begun: Sequence[EarlyWork], rows: pa.Table) -> None:
        """Let finished rows travel along the edges, and other nodes begin with them. NodeError where a column that the
        node declares is missing.
        """
        early = node.contract.early
        if missing := [name for name in (ROW_ID, GROUP_ID, *early) if name not in rows.column_names]:
            raise NodeError(f"node {node.name!r} handed over rows without {missing}: it declares early={list(early)}")
        runtime = self.runtime
        for edge in edges:
            runtime.loop.call_soon_threadsafe(runtime.databuffer.hand_over, edge, self.iteration, rows)
        for work in begun:
            work.take(rows)

    @contextmanager
    def named(self, node: Node) -> Iterator[None]:
        """Add node, iteration and worker to errors raised inside; any other exception becomes a NodeError."""
        position = f"{NODE}{node.name!r}, {self.iteration}"
        worker = self.runtime.device.worker
        where, origin = f"{position}, worker {worker!r}", Origin(worker, None, node.name, str(self.iteration))
        with self.runtime.pulse.at(position), named_errors(where, NodeError, origin):
            yield


def _join(tables: list[pa.Table]) -> pa.Table:
    """Join tables by row id. NodeError when they do not hold the same rows."""
    tables = [_sorted(table) for table in tables]
    first = tables[0]
    columns = {name: first[name] for name in first.column_names}
    for other in tables[1:]:
        if not other[ROW_ID].equals(first[ROW_ID]):
            raise NodeError(
                f"its parents hold different rows: {first.num_rows} and {other.num_rows}, not the same row ids; "
                "a node that removes rows must come before the branches part"
            )
        columns |= {name: other[name] for name in other.column_names if name not in IDENTITY}
    return pa.table(columns)


def _sorted(table: pa.Table) -> pa.Table:
    ids = table[ROW_ID].combine_chunks().to_numpy()
    return table if (ids[1:] >= ids[:-1]).all() else rows_at(table, np.argsort(ids, kind="stable"))


def checked(node: Node, columns: Sequence[str], table: pa.Table, output: object) -> pa.Table:
    """Return ``columns`` of a node's output for ``table``. NodeError when it differs from the node's contract."""
    if not isinstance(output, pa.Table):
        raise NodeError(f"node {node.name!r} gave a {type(output).__name__}: expected a pyarrow Table")
    contract = node.contract
    declared = {name: TYPES[name] for name in IDENTITY} | {field.name: field.type for field in contract.writes}
    known = set(declared) | (set(table.column_names) if contract.passes else set())
    if undeclared := [name for name in output.column_names if name not in known]:
        raise NodeError(f"node {node.name!r} gave columns it does not declare: {undeclared}; add them to its writes")
    if missing := [name for name in columns if name not in output.column_names]:
        raise NodeError(f"node {node.name!r} did not give {missing} (it gave {output.column_names})")
    made = _with_large_offsets(output)
    for name, kind in declared.items():
        if name in made.column_names and made[name].type != kind:
            raise NodeError(f"node {node.name!r} gave {name!r} as {made[name].type}: its contract says {kind}")
    same = contract.new_rows or made[ROW_ID].equals(table[ROW_ID])
    if not same and sorted(made[ROW_ID].to_pylist()) != table[ROW_ID].to_pylist():
        raise NodeError(f"node {node.name!r} changed which rows there are: declare new_rows=True in its @columns")
    if contract.groups is Groups.KEPT:
        _check_groups(node, table, made)
    return made.select(columns)


def _check_groups(node: Node, table: pa.Table, made: pa.Table) -> None:
    """Raise NodeError for rows of groups that a node had none of, and for several rows of one where one row came in."""
    groups, before = made[GROUP_ID].to_numpy(), table[GROUP_ID].to_numpy()
    if len(others := np.setdiff1d(groups, before)):
        raise NodeError(
            f"node {node.name!r} gave rows of {len(others)} groups that it had none of (first group_id {others[0]}): "
            "its contract says groups='kept', and a node that numbers groups anew declares groups='new'"
        )
    if node.contract.expand is None and len(groups) > len(np.unique(groups)) and len(before) == len(np.unique(before)):
        raise NodeError(f"node {node.name!r} gave several rows of a group where it had one: declare expand=...")


def _with_large_offsets(table: pa.Table) -> pa.Table:
    """Return the table with offsets of 64 bits; values are not copied."""
    schema = make_schema({field.name: field.type for field in table.schema})
    return table if table.schema.types == schema.types else table.cast(schema)
