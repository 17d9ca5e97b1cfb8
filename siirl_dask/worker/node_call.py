"""Calls a node's function: makes its context, joins its inputs, and checks its output."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from siirl_storage import write_part

from siirl_dask.context import ArrivingWeights, Context, Metric, Rank, RowWork
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.errors import NodeError, Origin
from siirl_dask.planner import NONFINITE, Input, Iteration, LoadPrompts, Node
from siirl_dask.schema import IDENTITY, ROW_ID
from siirl_dask.tables import rows_at, step_folder, with_values_of_groups
from siirl_dask.worker.early_work import FinishedRows
from siirl_dask.worker.monitoring.task_progress import NODE
from siirl_dask.worker.named_errors import named_errors
from siirl_dask.worker.node_output import checked
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
    early: FinishedRows | None = None
    """Passes finished rows on while their node makes others; None outside of a whole chain."""
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
            early_work: AbstractContextManager[RowWork | None] = nullcontext()
            if self.early is not None:
                context.hand_over = self.early.hand_over(node)
                early_work = self.early.begun(node)
            profile = self.runtime.profiling.of(node, self.iteration, context.rank)
            with profile, early_work as begun:
                context.begun = begun
                output = node.fn(context, table)
                return checked(node, columns, table, output)

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
