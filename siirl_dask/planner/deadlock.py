"""Deadlock check: proves for a plan that its workers can never wait for each other in a circle.

Two kinds of links wait. A ``RunNode`` may call collectives, which wait for the same node on all
workers of its role. A ``Recv`` waits for the ``Send`` of its edge, and of the edge's guide, on all
workers that hold the rows. The check holds every plan to three rules: all workers run their nodes
in one common order, a ``Send`` follows its source's ``RunNode``, and a ``Recv`` comes right before
its target's ``RunNode``. Now take the waiting workers at the earliest node of that order.
Everything they wait for is done, or is being done by workers at the same node, so they proceed.
Lagged links wait for an earlier iteration, which all workers run first.

A ``Stream`` is two nodes at one place of the order, and its workers go through its pieces in one
order: a source makes piece k once all sinks hold piece k - 4, and a sink asks for piece k once it
has made its own. The workers at the earliest piece therefore wait for nobody. The sinks of a lagged
one are steps ahead of its sources: they wait for these in no other node
(``weight_streams.find_streams``), so they come to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import Chain, Edge, Link, Plan, Recv, Restore, RunNode, Send, Stream
from siirl_dask.planner.node import Node
from siirl_dask.planner.weight_streams import run_order


def check_order(plan: Plan) -> None:
    """Raise PlanError if workers could wait for each other in a circle: a mistake of the
    planner, not of the user.
    """
    order = run_order(plan.dag, plan.streams)
    place = {node.name: at for at, node in enumerate(order)}
    ran: dict[str, list[Node]] = {}
    for worker, chain in plan.chains.items():
        ran[worker] = []
        for link in chain.flat:
            ran[worker].extend(_run(link))
    for worker, nodes in ran.items():
        for before, after in pairwise(nodes):
            if place[before.name] >= place[after.name]:
                what = f"runs {after.name!r} after {before.name!r}: the order is {list(place)}"
                raise PlanError(_text(worker, what))
    for role, workers in plan.placement.items():
        expected = [node.name for node in order if node.role == role]
        for worker in workers:
            actual = [node.name for node in ran[worker] if node.role == role]
            if actual != expected:
                raise PlanError(
                    _text(worker, f"runs {actual} of role {role!r}: expected {expected}")
                )
    sent = {worker: _sent(chain) for worker, chain in plan.chains.items()}
    for worker, chain in plan.chains.items():
        _check_receives(worker, chain)
    _check_edges(plan.edges, sent, place)


def _run(link: Link) -> tuple[Node, ...]:
    match link:
        case RunNode(node) | Restore(node):
            return (node,)
        case Stream(source, target, gives, takes):
            nodes = []
            if gives:
                nodes.append(source)
            if takes:
                nodes.append(target)
            return tuple(nodes)
    return ()


def _sent(chain: Chain) -> set[str]:
    """Return the edges that the chain sends, each right after its source node."""
    latest = ""
    sent: set[str] = set()
    for link in chain.flat:
        match link:
            case RunNode(node) | Restore(node):
                latest = node.name
            case Send(edge):
                if edge.source != latest:
                    raise PlanError(
                        _text(chain.worker, f"sends {edge.name} after it ran {latest!r}")
                    )
                sent.add(edge.name)
            case Stream(source, gives=True, edge=edge):
                latest = source.name
                if edge is not None:
                    sent.add(edge.name)
    return sent


def _check_receives(worker: str, chain: Chain) -> None:
    following = ""
    for link in reversed(tuple(chain.flat)):
        match link:
            case RunNode() | Restore() | Stream():
                following = _run(link)[0].name
            case Recv(edge, guide) if {edge.target, guide.target} != {following}:
                raise PlanError(
                    _text(
                        worker,
                        f"receives {edge.name}, guided by {guide.name}, before {following!r}",
                    )
                )


def _check_edges(
    edges: Iterable[Edge], sent: Mapping[str, set[str]], place: Mapping[str, int]
) -> None:
    for edge in edges:
        if place[edge.source] >= place[edge.target]:
            raise PlanError(
                _text(edge.targets[0], f"receives {edge.name}, against the order {list(place)}")
            )
        for worker in edge.sources:
            if edge.name not in sent[worker]:
                raise PlanError(_text(worker, f"never sends {edge.name}"))


def _text(worker: str, mistake: str) -> str:
    return (
        f"the plan could stand still, which is a mistake in the planner: worker {worker!r} "
        f"{mistake}"
    )
