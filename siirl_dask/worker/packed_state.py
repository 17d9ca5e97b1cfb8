"""State that nodes have on a worker for later steps: packed into rows that the run stores, and
unpacked where a run goes on from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from siirl_dask.errors import NodeError
from siirl_dask.planner import Iteration, Node, Phase, Plan
from siirl_dask.schema import GROUP_ID, ROW_ID
from siirl_dask.tables import read_kept_rows
from siirl_dask.worker.node_call import NodeCalls

if TYPE_CHECKING:
    from siirl_dask.worker.executor import WorkerRuntime


def packed_state(calls: NodeCalls, node: Node) -> pa.Table:
    """Return the state that a node has on this worker for later steps. NodeError unless it
    is a table of rows.
    """
    carries = node.contract.carries
    assert carries is not None
    with calls.node_scope(node):
        rows = carries.pack(calls.node_context(node), **node.options)
        if not isinstance(rows, pa.Table) or not {ROW_ID, GROUP_ID} <= set(rows.column_names):
            raise NodeError(
                f"node {node.name!r} packed no table with {ROW_ID} and {GROUP_ID} of what it keeps"
            )
        return rows


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
