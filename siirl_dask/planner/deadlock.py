"""That a plan cannot stand still: the proof, by looking at it.

Two kinds of links wait. A ``Run`` may call collectives, which wait for the same node on all workers of its role; a
``Recv`` waits for the ``Send`` of its edge on all workers that have the rows, and of the edge that guides it. If every
worker goes through its nodes in one order that all share, and a ``Send`` comes with its source's ``Run`` while a
``Recv`` comes just before its target's, then of all waiting workers those at the first node in that order wait for
nobody: what they need has been run, or is being run by workers that are at the same node. What links that are behind
wait for belongs to an iteration that all workers take before.

A ``Stream`` is two nodes at one place in that order. Its workers go through its parts in one order too: whoever gives
makes part k when all who take have part k - 4, and whoever takes asks for part k when it has made its own. So of those
in a stream, the ones at the earliest part wait for nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import Chain, Edge, Link, Plan, Recv, Run, Send, Stream
from siirl_dask.planner.dag import Node
from siirl_dask.planner.weight_streams import run_order


def check_order(plan: Plan) -> None:
    """PlanError, a mistake of the planner's and not the user's, when workers could wait for each other in a circle."""
    order = run_order(plan.dag, plan.streams)
    place = {node.name: at for at, node in enumerate(order)}
    ran = {worker: [node for link in chain.flat for node in _run(link)] for worker, chain in plan.chains.items()}
    for worker, nodes in ran.items():
        for before, after in pairwise(nodes):
            if place[before.name] >= place[after.name]:
                raise PlanError(_text(worker, f"runs {after.name!r} after {before.name!r}: the order is {list(place)}"))
    for role, workers in plan.placement.items():
        expected = [node.name for node in order if node.role == role]
        for worker in workers:
            found = [node.name for node in ran[worker] if node.role == role]
            if found != expected:
                raise PlanError(_text(worker, f"runs {found} of role {role!r}: expected {expected}"))
    sent = {worker: _sent(chain) for worker, chain in plan.chains.items()}
    for worker, chain in plan.chains.items():
        _check_receives(worker, chain)
    _check_edges(plan.edges, sent, place)


def _run(link: Link) -> tuple[Node, ...]:
    match link:
        case Run(node):
            return (node,)
        case Stream(source, target, gives, takes):
            return (source,) * gives + (target,) * takes
    return ()


def _sent(chain: Chain) -> set[str]:
    """Edges that the chain serves, each after its source node and before the next."""
    latest, sent = "", set[str]()
    for link in chain.flat:
        match link:
            case Run(node):
                latest = node.name
            case Send(edge):
                if edge.source != latest:
                    raise PlanError(_text(chain.worker, f"sends {edge.name} after it ran {latest!r}"))
                sent.add(edge.name)
            case Stream(source, gives=True, edge=edge):
                latest = source.name
                sent |= {edge.name} if edge else set()
    return sent


def _check_receives(worker: str, chain: Chain) -> None:
    following = ""
    for link in reversed(tuple(chain.flat)):
        match link:
            case Run() | Stream():
                following = _run(link)[0].name
            case Recv(edge, guide) if {edge.target, guide.target} != {following}:
                raise PlanError(_text(worker, f"receives {edge.name}, guided by {guide.name}, before {following!r}"))


def _check_edges(edges: Iterable[Edge], sent: Mapping[str, set[str]], place: Mapping[str, int]) -> None:
    for edge in edges:
        if place[edge.source] >= place[edge.target]:
            raise PlanError(_text(edge.targets[0], f"receives {edge.name}, against the order {list(place)}"))
        if silent := [worker for worker in edge.sources if edge.name not in sent[worker]]:
            raise PlanError(_text(silent[0], f"never sends {edge.name}"))


def _text(worker: str, what: str) -> str:
    return f"the plan could stand still, which is a mistake in the planner: worker {worker!r} {what}"
