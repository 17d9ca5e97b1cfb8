"""Checks how the policy's new weights reach the engines (``rollout.weight_sync``), and describes
it for a plan.
"""

from __future__ import annotations

from collections.abc import Iterator

from siirl_dask.config import Config, WeightSync
from siirl_dask.errors import PlanError
from siirl_dask.planner import NodeColumns, Plan
from siirl_dask.planner.weight_streams import stays, why_no_broadcast
from siirl_dask.schema import PARAMETER_DATA
from siirl_dask.wording import worker_ranges


def check_weight_sync(config: Config, plan: Plan) -> None:
    """Raise PlanError if ``rollout.weight_sync=broadcast`` and a broadcast cannot bring all
    weights of the plan.
    """
    if config.rollout.weight_sync is not WeightSync.broadcast:
        return
    for source, target in _transfers(plan):
        reason = why_no_broadcast(source, target, plan.placement, plan.streams, plan.flow)
        if reason:
            raise PlanError(
                "rollout.weight_sync=broadcast, and none can bring the weights of node "
                f"{source.node.name!r} to node "
                f"{target.node.name!r}: {reason}; change that, or take rollout.weight_sync=auto"
            )


def transfer_notes(config: Config, plan: Plan) -> list[str]:
    """Return a sentence on each transfer of weights between workers, as far as is known before
    the devices are.
    """
    workers = tuple(plan.chains)
    weight_sync = config.rollout.weight_sync
    notes = []
    for source, target in _transfers(plan):
        senders = plan.placement[source.node.role]
        receivers = plan.placement[target.node.role]
        if set(senders) == set(receivers) and len(senders) == 1:
            continue
        weights = f"new weights ({source.node.name} -> {target.node.name})"
        if plan.streams.get(source.node.name) == target.node.name and stays(
            source, target, plan.placement
        ):
            notes.append(
                f"{weights} stay on their workers: each engine loads what its trainer has gathered"
            )
            continue
        reason = why_no_broadcast(source, target, plan.placement, plan.streams, plan.flow)
        broadcast = f"by broadcast from worker {senders[0]} to {worker_ranges(receivers, workers)}"
        if weight_sync is WeightSync.rows:
            route = "as rows: rollout.weight_sync=rows"
        elif reason:
            route = f"as rows: {reason}"
        elif weight_sync is WeightSync.broadcast:
            route = broadcast
        else:
            both = worker_ranges((*senders, *receivers), workers)
            route = f"{broadcast} if workers {both} have an accelerator each, else as rows"
        notes.append(f"{weights} go {route}")
    return notes


def _transfers(plan: Plan) -> Iterator[tuple[NodeColumns, NodeColumns]]:
    """Yield each node that publishes weights, with each node that reads them."""
    for source in plan.flow.values():
        if PARAMETER_DATA not in source.node.contract.writes.names:
            continue
        for target in plan.flow.values():
            if source.node.name in (*target.node.after, *target.sources.values()):
                yield source, target
