"""How the policy's new weights go to the engines (``rollout.weights_by``): what a plan allows, in words, and PlanError
where it does not allow what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from siirl_dask.config import Config, WeightsBy
from siirl_dask.errors import PlanError
from siirl_dask.planner import Plan, Stage
from siirl_dask.planner.streams import why_no_broadcast
from siirl_dask.planner.text import who
from siirl_dask.schema import PARAMETER_DATA


def refuse_wrong_transfers(config: Config, plan: Plan) -> None:
    """PlanError where ``rollout.weights_by=broadcast`` and the plan has weights that no broadcast can bring."""
    if config.rollout.weights_by is not WeightsBy.broadcast:
        return
    for source, target in _transfers(plan):
        if reason := why_no_broadcast(source, target, plan.placement, plan.streams):
            raise PlanError(
                f"rollout.weights_by=broadcast, and none can bring the weights of node {source.node.name!r} to node "
                f"{target.node.name!r}: {reason}; change that, or take rollout.weights_by=auto"
            )


def transfer_notes(config: Config, plan: Plan) -> list[str]:
    """Of weights that leave their workers, which way they take, as far as that is known before devices are."""
    workers, way, notes = tuple(plan.chains), config.rollout.weights_by, []
    for source, target in _transfers(plan):
        giving, taking = plan.placement[source.node.role], plan.placement[target.node.role]
        if set(giving) == set(taking) and len(giving) == 1:
            continue
        reason = why_no_broadcast(source, target, plan.placement, plan.streams)
        broadcast = f"by broadcast from worker {giving[0]} to {who(taking, workers)}"
        if way is WeightsBy.rows or reason:
            told = f"as rows: {reason if reason and way is not WeightsBy.rows else 'rollout.weights_by=rows'}"
        elif way is WeightsBy.broadcast:
            told = broadcast
        else:
            both = who((*giving, *taking), workers)
            told = f"{broadcast} if workers {both} have an accelerator each, else as rows"
        notes.append(f"new weights ({source.node.name} -> {target.node.name}) go {told}")
    return notes


def _transfers(plan: Plan) -> Iterator[tuple[Stage, Stage]]:
    """What publishes weights, and what reads them."""
    for source in plan.stages.values():
        if PARAMETER_DATA not in source.node.contract.writes.names:
            continue
        for target in plan.stages.values():
            if source.node.name in (*target.node.after, *target.providers.values()):
                yield source, target
