"""Calls a node's function: makes its context, joins its inputs, passes finished rows on early, and
checks its output against its contract.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from siirl_storage import write_part

from siirl_dask.context import ArrivingWeights, Context, Metric, Rank
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.errors import NodeError, Origin
from siirl_dask.planner import (
    NONFINITE,
    Edge,
    Groups,
    Input,
    Iteration,
    LoadPrompts,
    Node,
    Phase,
    Plan,
    RunNode,
)
from siirl_dask.schema import GROUP_ID, IDENTITY, ROW_ID, TYPES, make_schema
from siirl_dask.tables import read_kept_rows, rows_at, step_folder, with_values_of_groups
from siirl_dask.worker.early_work import EarlyWork
from siirl_dask.worker.monitoring.task_progress import NODE
from siirl_dask.worker.named_errors import named_errors
from siirl_dask.worker.stages import StepProgress

if TYPE_CHECKING:
    from siirl_dask.worker.executor import WorkerRuntime


logger = logging.getLogger("siirl_dask.worker")


@dataclass(slots=True)
class NodeCalls:
    """Calls the nodes of one pass through a chain, and holds the tables and metrics that they
    share.
    """

    runtime: WorkerRuntime
    iteration: Iteration
    loader: Dataloader | None
    """None where the chain loads no prompts."""
    tables: dict[str, pa.Table] = field(default_factory=dict)
    """Live tables by the name of a node or of an edge."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    """Metrics logged so far."""
    early_edges: Mapping[str, Sequence[Edge]] = field(default_factory=dict)
    """Edges along which rows can leave this worker before their node is done, by the node."""
    early_nodes: Mapping[str, Sequence[RunNode]] = field(default_factory=dict)
    """Links of nodes that begin with finished rows of another node, by that node's name."""
    early_work: dict[str, EarlyWork] = field(default_factory=dict)
    """Work of nodes that have begun with finished rows and whose own call is still to come, by
    node."""
    reloaded: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Roles that get new weights after a node, before any other node uses them, by the node."""
    prompts_link: LoadPrompts | None = None
    """The link that read this worker's prompts; a node that draws more prompts continues from
    it."""

    def call(
        self,
        node: Node,
        inputs: Sequence[Input],
        columns: Sequence[str],
        arriving_weights: ArrivingWeights | None = None,
    ) -> pa.Table:
        """Run the node's function and return ``columns`` of its output. NodeError when it breaks
        its contract.
        """
        with self.node_scope(node):
            table = self.join_inputs(inputs)
            context = self.node_context(node)
            context.arriving_weights = arriving_weights
            self._enable_hand_over(context, node)
            profile = self.runtime.profiling.of(node, self.iteration, context.rank)
            early_work = self.early_work.pop(node.name, nullcontext())
            with profile, early_work as begun:
                context.begun = begun
                output = node.fn(context, table)
                return checked(node, columns, table, output)

    def packed_state(self, node: Node) -> pa.Table:
        """Return the state that a node has on this worker for later steps. NodeError unless it
        is a table of rows.
        """
        carries = node.contract.carries
        assert carries is not None
        with self.node_scope(node):
            rows = carries.pack(self.node_context(node), **node.options)
            if not isinstance(rows, pa.Table) or not {ROW_ID, GROUP_ID} <= set(rows.column_names):
                raise NodeError(
                    f"node {node.name!r} packed no table with {ROW_ID} and {GROUP_ID} of what it "
                    "keeps"
                )
            return rows

    def step_progress(self) -> StepProgress:
        """Return the metrics and the dataloader's position at this moment, for a table that is
        saved now.
        """
        position = None if self.loader is None else self.loader.position
        return StepProgress(self.metrics, position)

    def join_inputs(self, inputs: Sequence[Input]) -> pa.Table:
        """Return one table with the columns of all inputs, sorted by row id; values that rows
        share are not copied.
        """
        by_row = []
        by_group = []
        for item in inputs:
            if item.by_group:
                by_group.append(item)
            else:
                by_row.append(self.tables[item.table].select(item.columns))
        table = _join(by_row)
        for item in by_group:
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

    def node_context(self, node: Node) -> Context:
        """Return the context that the node's function is called with."""
        runtime = self.runtime
        context = self.context(node.role)
        context.agent = node.agent
        context.node = node.name
        state_key = f"{self.iteration.phase.counts_as}/{node.name}"
        context.state = runtime.node_state.setdefault(state_key, {})
        context.dump_nonfinite = partial(
            write_nonfinite_rows, runtime.run_url, node.name, self.iteration.step, context.rank
        )
        context.reloaded = self.reloaded.get(node.name, frozenset())
        if runtime.share_work is not None and context.rank.size > 1:
            context.steal_from_peers = partial(runtime.share_work, self.iteration, node)
        link = self.prompts_link
        if node.contract.draws and link is not None and self.loader is not None:
            context.draw_prompts = partial(
                self.loader.draw_prompts,
                columns=link.columns,
                index=link.index,
                count=link.count,
            )
        return context

    def _enable_hand_over(self, context: Context, node: Node) -> None:
        """Set ``context.hand_over`` where edges or other nodes on this worker can take the
        node's rows early.
        """
        edges = self.early_edges.get(node.name, ())
        works = []
        for run in self.early_nodes.get(node.name, ()):
            work = EarlyWork.begin(run, self.context(run.node.role).resource)
            self.early_work[run.node.name] = work
            works.append(work)
        if edges or works:
            context.hand_over = partial(self._hand_over, node, edges, works)

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
        runtime = self.runtime
        for edge in edges:
            runtime.loop.call_soon_threadsafe(
                runtime.databuffer.hand_over, edge, self.iteration, rows
            )
        for work in works:
            work.take(rows)

    @contextmanager
    def node_scope(self, node: Node) -> Iterator[None]:
        """Report the node as where this worker is, and add node, iteration and worker to errors
        raised inside; an exception that is no SiirlError becomes a NodeError.
        """
        place = f"{NODE}{node.name!r}, {self.iteration}"
        worker = self.runtime.device.worker
        origin = Origin(worker, None, node.name, str(self.iteration))
        with (
            self.runtime.progress.at(place),
            named_errors(f"{place}, worker {worker!r}", NodeError, origin),
        ):
            yield


def restore_packed_state(runtime: WorkerRuntime, plan: Plan, folders: Mapping[str, str]) -> None:
    """Unpack the stored state of nodes on this worker, in a run that goes on from the stored rows
    of a step.

    ``folders`` has the folder of each node's rows, of which this worker's share is read. NodeError
    when a node does not take its rows, DataError when they cannot be read.
    """
    calls = NodeCalls(runtime, Iteration(Phase.TRAIN, 0, 0), None)
    worker = runtime.device.worker
    for name, folder in folders.items():
        node = plan.dag.node(name)
        workers = plan.placement[node.role]
        carries = node.contract.carries
        if carries is None or worker not in workers:
            continue
        with calls.node_scope(node):
            rows = read_kept_rows(folder, workers.index(worker), len(workers), runtime.read_limit)
            if rows is not None:
                carries.unpack(calls.node_context(node), rows, **node.options)


def write_nonfinite_rows(
    run_url: str,
    node: str,
    step: int,
    rank: Rank,
    rows: pa.Table,
) -> str | None:
    """Write ``rows`` as the part of ``rank`` of the table ``nonfinite-NODE`` at ``step``, whole or
    not at all.

    Returns the step's folder; None where the store fails, which must not hide the error that the
    rows explain. No other part of a run reads these rows: they are for people to look at.
    """
    folder = step_folder(run_url, NONFINITE + node, step)
    try:
        write_part(folder, rank.rank, rank.size, rows)
    except Exception as error:  # each store has errors of its own
        logger.warning(
            "rows of step %d are not written to %s: %s: %s",
            step,
            folder,
            type(error).__name__,
            error,
        )
        return None
    return folder


def _join(tables: list[pa.Table]) -> pa.Table:
    """Join tables by row id. NodeError when they do not hold the same rows."""
    tables = [_sorted(table) for table in tables]
    first = tables[0]
    columns = {name: first[name] for name in first.column_names}
    for other in tables[1:]:
        if not other[ROW_ID].equals(first[ROW_ID]):
            raise NodeError(
                f"its parents hold different rows: {first.num_rows} and {other.num_rows}, not the "
                "same row ids; a node that removes rows must come before the branches part"
            )
        columns |= {name: other[name] for name in other.column_names if name not in IDENTITY}
    return pa.table(columns)


def _sorted(table: pa.Table) -> pa.Table:
    ids = table[ROW_ID].combine_chunks().to_numpy()
    if (ids[1:] >= ids[:-1]).all():
        return table
    return rows_at(table, np.argsort(ids, kind="stable"))


def checked(node: Node, columns: Sequence[str], table: pa.Table, output: object) -> pa.Table:
    """Return ``columns`` of a node's output for ``table``. NodeError when it differs from the
    node's contract.
    """
    if not isinstance(output, pa.Table):
        raise NodeError(
            f"node {node.name!r} gave a {type(output).__name__}: expected a pyarrow Table"
        )
    contract = node.contract
    declared = {name: TYPES[name] for name in IDENTITY}
    declared.update({field.name: field.type for field in contract.writes})
    known = set(declared)
    if contract.passes:
        known.update(table.column_names)
    undeclared = [name for name in output.column_names if name not in known]
    if undeclared:
        raise NodeError(
            f"node {node.name!r} gave columns it does not declare: {undeclared}; add them to its "
            "writes"
        )
    missing = [name for name in columns if name not in output.column_names]
    if missing:
        raise NodeError(
            f"node {node.name!r} did not give {missing} (it gave {output.column_names})"
        )
    schema = make_schema({field.name: field.type for field in output.schema})
    result = output
    if output.schema.types != schema.types:
        result = output.cast(schema)  # to offsets of 64 bits; values are not copied
    for name, kind in declared.items():
        if name in result.column_names and result[name].type != kind:
            raise NodeError(
                f"node {node.name!r} gave {name!r} as {result[name].type}: its contract says {kind}"
            )
    if not contract.new_rows and not _has_same_rows(table, result):
        raise NodeError(
            f"node {node.name!r} changed which rows there are: declare new_rows=True in its "
            "@columns"
        )
    if contract.groups is Groups.KEPT:
        _check_groups(node, table, result)
    return result.select(columns)


def _has_same_rows(table: pa.Table, output: pa.Table) -> bool:
    """Return whether the output has the table's rows, in whatever order."""
    if output[ROW_ID].equals(table[ROW_ID]):
        return True
    same: bool = sorted(output[ROW_ID].to_pylist()) == table[ROW_ID].to_pylist()
    return same


def _check_groups(node: Node, table: pa.Table, output: pa.Table) -> None:
    """Raise NodeError for an output row of a group that no input row is of, and for several output
    rows of a group that one input row is of, unless the node declares ``expand``.
    """
    groups = output[GROUP_ID].to_numpy()
    input_groups = table[GROUP_ID].to_numpy()
    new_groups = np.setdiff1d(groups, input_groups)
    if len(new_groups):
        raise NodeError(
            f"node {node.name!r} gave rows of {len(new_groups)} groups that it had none of (first "
            f"group_id {new_groups[0]}): its contract says groups='kept', and a node that numbers "
            "groups anew declares groups='new'"
        )
    if node.contract.expand is not None:
        return
    repeats_groups = len(groups) > len(np.unique(groups))
    if repeats_groups and len(input_groups) == len(np.unique(input_groups)):
        raise NodeError(
            f"node {node.name!r} gave several rows of a group where it had one: declare expand=..."
        )
