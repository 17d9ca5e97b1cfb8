"""Places roles on workers, and tells which groups of their ranks lie on several hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import gcd

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.chain import Plan
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.hosts import Hosts, arrange, by_host, groups_apart
from siirl_dask.planner.role_contract import groups_of


def place_roles(
    dag: DAG,
    workers: Sequence[str],
    placement: Mapping[str, Sequence[int]],
    hosts: Hosts,
) -> dict[str, tuple[str, ...]]:
    """Return the workers of each role in rank order. PlanError when the placement names an
    unknown role or worker.
    """
    roles = [role.name for role in dag.roles]
    for role, indices in placement.items():
        if role not in roles:
            raise PlanError(
                f"the placement names role {role!r}, which the DAG has "
                f"not{did_you_mean(role, roles)}"
            )
        for index in indices:
            if not 0 <= index < len(workers):
                raise PlanError(
                    f"the placement puts role {role!r} on worker {index}: there are "
                    f"{len(workers)}, from 0"
                )
        if not indices or len(set(indices)) != len(indices):
            raise PlanError(
                f"the placement puts role {role!r} on {list(indices)}: expected workers, each one "
                "once"
            )
    everywhere = [role for role in dag.roles if role.name not in placement]
    sizes: list[int] = []
    for unplaced in everywhere:
        sizes.extend(groups_of(unplaced.build, len(workers)).values())
    # one order for all of them: rows stay where roles have the same workers
    order = arrange(workers, hosts, sizes)
    placed = {}
    for role in roles:
        placed[role] = order
        if role in placement:
            placed[role] = tuple(workers[index] for index in placement[role])
    return placed


def check_neighbours(dag: DAG, placed: Mapping[str, tuple[str, ...]]) -> None:
    """Raise PlanError for a node that needs another role on its own workers where that is not."""
    for node in dag.nodes:
        role = node.contract.neighbour
        if role is None:
            continue
        if role not in placed:
            raise PlanError(
                f"node {node.name!r} uses role {role!r}, which the DAG has "
                f"not{did_you_mean(role, placed)}"
            )
        alone = [worker for worker in placed[node.role] if worker not in placed[role]]
        if alone:
            raise PlanError(
                f"node {node.name!r} uses role {role!r} on each worker of its own role "
                f"{node.role!r}, and worker "
                f"{alone[0]!r} has it not: place {role!r} where {node.role!r} is"
            )


def host_notes(plan: Plan) -> Iterator[str]:
    """Yield a sentence on each kind of groups of which some lie on several hosts, and on what
    can be done about it.
    """
    for role in plan.dag.roles:
        workers = plan.placement[role.name]
        sizes = groups_of(role.build, len(workers))
        best = arrange(workers, plan.hosts, sizes.values())
        for key, size in sizes.items():
            apart = groups_apart(workers, plan.hosts, size)
            if apart:
                least = len(groups_apart(best, plan.hosts, size))
                which = _apart(apart, key, size, len(workers) // size, plan.hosts)
                hosts = by_host(workers, plan.hosts).values()
                advice = _advice(key, size, len(apart), least, hosts)
                yield f"role {role.name!r}: {which}; {advice}"


def _apart(apart: Sequence[tuple[str, ...]], key: str, size: int, groups: int, hosts: Hosts) -> str:
    first_group = by_host(apart[0], hosts)
    if groups == 1:
        return f"its {size} ranks ({key}) are on {len(first_group)} hosts"
    places = []
    for host, workers in first_group.items():
        places.append(f"{', '.join(workers)} on {host}")
    first = ", ".join(places)
    return (
        f"{len(apart)} of its {groups} groups of {size} ranks ({key}) are on several hosts, the "
        f"first with {first}"
    )


def _advice(key: str, size: int, apart: int, least: int, hosts: Collection[Sequence[str]]) -> str:
    """Return what would put more groups of ``size`` on one host; ``least`` of the ``apart`` must
    be on several.
    """
    if least < apart:
        return f"with its workers in another order in cluster.placement, {least or 'none'} would be"
    fitting = gcd(*map(len, hosts))
    if fitting > 1 and fitting < size:
        return (
            f"no order of its workers does better; {key}={fitting} would keep each group on one "
            "host"
        )
    return "no order of its workers does better"
