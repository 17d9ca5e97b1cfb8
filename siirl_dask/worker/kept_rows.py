"""Gives nodes back what they had kept for later steps, in a run that goes on from the stored rows of such a step."""

from __future__ import annotations

from collections.abc import Mapping

from siirl_dask.coordinator.stored_rows import read_kept_rows
from siirl_dask.planner import Iteration, Phase, Plan
from siirl_dask.worker.node_call import NodeCalls
from siirl_dask.worker.runtime import WorkerRuntime


def give_back(runtime: WorkerRuntime, plan: Plan, folders: Mapping[str, str]) -> None:
    """Have nodes of ``plan`` on this worker take their share of what lies in ``folders``, by node.

    NodeError when a node does not take it, DataError when it cannot be read.
    """
    calls = NodeCalls(runtime, Iteration(Phase.TRAIN, 0, 0), None)
    for name, folder in folders.items():
        node = plan.dag.node(name)
        workers, carries = plan.placement[node.role], node.contract.carries
        if carries is None or runtime.device.worker not in workers:
            continue
        with calls.named(node):
            rows = read_kept_rows(folder, workers.index(runtime.device.worker), len(workers), runtime.read_limit)
            if rows is not None:
                carries.unpack(calls.context_of(node), rows, **node.options)
