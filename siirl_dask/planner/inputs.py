"""The inputs of a plan, from which each worker computes it for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from siirl_dask.planner.chain import Plan
from siirl_dask.planner.compile import compile_chains
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.hosts import host_of
from siirl_dask.schema import Schema


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """Everything that a plan is computed from: the same inputs give the same plan in every process.

    Workers get these and plan for themselves. A plan for 1,024 of them is a hundred times larger
    than its inputs.
    """

    dag: DAG
    dataset: Schema
    placement: Mapping[str, tuple[int, ...]]
    """Workers of each role, by index."""
    hosts: tuple[str, ...]
    """Host of each worker; empty where all are on one."""
    whole: frozenset[str] = frozenset()
    """Nodes whose tables are not streamed."""
    overlap: bool = True
    """Whether nodes may begin with finished rows of a node above."""

    @staticmethod
    def of(plan: Plan) -> PlanInputs:
        """Return the inputs of ``plan``, but for the names of its workers."""
        index = {worker: number for number, worker in enumerate(plan.chains)}
        placed = {}
        for role, workers in plan.placement.items():
            placed[role] = tuple(index[worker] for worker in workers)
        hosts = tuple(host_of(worker, plan.hosts) for worker in index if plan.hosts)
        return PlanInputs(
            dag=plan.dag,
            dataset=plan.dataset,
            placement=placed,
            hosts=hosts,
            whole=plan.whole,
            overlap=plan.overlap,
        )

    def compile(self, workers: Sequence[str]) -> Plan:
        """Return the plan on ``workers``, in the order in which it was planned for them before."""
        hosts = None
        if self.hosts:
            hosts = dict(zip(workers, self.hosts, strict=True))
        return compile_chains(
            self.dag,
            workers,
            self.dataset,
            placement=self.placement,
            hosts=hosts,
            whole=self.whole,
            overlap=self.overlap,
        )


P = TypeVar("P")


def alike(plans: Mapping[P, Plan]) -> dict[P, Plan]:
    """Return the plans of phases whose steps take lagged rows from one another: they stream the
    same ones.

    A step after a replay loads weights that the replay published, by its own plan.
    """
    common = frozenset.intersection(*(plan.lagged_streams for plan in plans.values()))
    alike_plans = {}
    for phase, plan in plans.items():
        if plan.lagged_streams != common:
            inputs = replace(PlanInputs.of(plan), whole=plan.lagged_streams - common)
            plan = inputs.compile(list(plan.chains))
        alike_plans[phase] = plan
    return alike_plans
