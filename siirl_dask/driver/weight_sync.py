"""Checks how the policy's new weights will reach the engines (``rollout.weight_sync``), and says so for readers."""

from __future__ import annotations

from collections.abc import Iterator

from siirl_dask.config import Config, WeightSync
from siirl_dask.errors import PlanError
from siirl_dask.planner import Plan, Stage
from siirl_dask.planner.explain.tables import worker_ranges
from siirl_dask.planner.weight_streams import why_no_broadcast
from siirl_dask.schema import PARAMETER_DATA


def check_weight_sync(config: Config, plan: Plan) -> None:
    """PlanError where ``rollout.weight_sync=broadcast`` and the plan has weights that no broadcast can bring."""
    if config.rollout.weight_sync is not WeightSync.broadcast:
        return
    for source, target in _transfers(plan):
        if reason := why_no_broadcast(source, target, plan.placement, plan.streams):
            raise PlanError(
                f"rollout.weight_sync=broadcast, and none can bring the weights of node {source.node.name!r} to node "
                f"{target.node.name!r}: {reason}; change that, or take rollout.weight_sync=auto"
            )


def transfer_notes(config: Config, plan: Plan) -> list[str]:
    """How weights that leave their workers travel, as far as that is known before the devices are. Sentences."""
    workers, way, notes = tuple(plan.chains), config.rollout.weight_sync, []
    for source, target in _transfers(plan):
        giving, taking = plan.placement[source.node.role], plan.placement[target.node.role]
        if set(giving) == set(taking) and len(giving) == 1:
            continue
        reason = why_no_broadcast(source, target, plan.placement, plan.streams)
        broadcast = f"by broadcast from worker {giving[0]} to {worker_ranges(taking, workers)}"
        if way is WeightSync.rows or reason:
            route = f"as rows: {reason if reason and way is not WeightSync.rows else 'rollout.weight_sync=rows'}"
        elif way is WeightSync.broadcast:
            route = broadcast
        else:
            both = worker_ranges((*giving, *taking), workers)
            route = f"{broadcast} if workers {both} have an accelerator each, else as rows"
        notes.append(f"new weights ({source.node.name} -> {target.node.name}) go {route}")
    return notes


def _transfers(plan: Plan) -> Iterator[tuple[Stage, Stage]]:
    """Each stage that publishes weights, with each that reads them."""
    for source in plan.stages.values():
        if PARAMETER_DATA not in source.node.contract.writes.names:
            continue
        for target in plan.stages.values():
            if source.node.name in (*target.node.after, *target.sources.values()):
                yield source, target
