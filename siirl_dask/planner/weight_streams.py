"""Finds the tables that are streamed piece by piece, from the node that makes them to their only
reader.
"""

from __future__ import annotations

from collections.abc import Mapping

from siirl_dask.planner.chain import Stream
from siirl_dask.planner.column_flow import NodeColumns
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.moves import Move
from siirl_dask.planner.node import Node, Rows
from siirl_dask.planner.spec.names import short_name
from siirl_dask.schema import PARAMETER_DTYPE, PARAMETER_SHAPE
from siirl_dask.wording import steps_behind

Placed = Mapping[str, tuple[str, ...]]
"""Workers of each role, in rank order."""


def find_streams(flow: Mapping[str, NodeColumns], placed: Placed) -> dict[str, str]:
    """Return the target node of each source node whose table can be streamed.

    A table is made whole if it is saved, if several nodes read it, if one of the two functions
    declares no stream, if a node takes it while it runs, or if its reader is steps behind and the
    source may not wait for it: see ``_may_wait``.
    """
    readers: dict[str, list[str]] = {name: [] for name in flow}
    for name, node_columns in flow.items():
        for source in dict.fromkeys((*node_columns.node.after, *node_columns.sources.values())):
            readers[source].append(name)
    streams = {}
    for source, names in readers.items():
        # of several readers, or of one that others read in turn
        if len(names) != 1 or readers[names[0]]:
            continue
        target = names[0]
        if not _fit(flow[source].node, flow[target].node):
            continue
        if taken_in_flight(flow, flow[target].node):
            continue
        if not flow[target].node.lag or _may_wait(flow, placed, source, target):
            streams[source] = target
    return streams


def _may_wait(flow: Mapping[str, NodeColumns], placed: Placed, source: str, target: str) -> bool:
    """Return whether the workers of ``source`` may wait in their step for those of ``target``,
    which are steps ahead.

    A stream's source waits until its pieces are taken. So what the target's workers do until then
    must not wait for the source's: no other node of theirs gets rows from these, or from workers
    that wait for these, or shares a role with them.
    """
    waiting = set(placed[flow[source].node.role])
    grown = True
    while grown:
        grown = False
        for name, node_columns in flow.items():
            own = placed[node_columns.node.role]
            parents = (*node_columns.node.after, *node_columns.sources.values())
            before = {worker for parent in parents for worker in placed[flow[parent].node.role]}
            if (
                name != target
                and not waiting.isdisjoint({*own, *before})
                and not waiting.issuperset(own)
            ):
                waiting.update(own)
                grown = True
    return waiting.isdisjoint(placed[flow[target].node.role])


def taken_in_flight(flow: Mapping[str, NodeColumns], target: Node) -> bool:
    """Return whether a node that generates loads the weights which ``target`` loads otherwise.

    Engines take such weights when they have arrived, each at a time of its own. In a stream, and in
    a broadcast, all of them would wait for the last.
    """
    if not target.lag:
        return False
    return any(
        node_columns.node.contract.in_flight and node_columns.node.role == target.role
        for node_columns in flow.values()
    )


def stays(source: NodeColumns, target: NodeColumns, placed: Placed) -> bool:
    """Return whether each worker takes the tensors of a stream from itself, without a table: it has
    both roles, and all of the source's workers go through all tensors.
    """
    if set(placed[source.node.role]) != set(placed[target.node.role]):
        return False
    return handle_tensors(source.node, target.node)


def handle_tensors(source: Node, target: Node) -> bool:
    """Return whether the first node gives its weights as tensors, and the second takes them so,
    without a table.
    """
    gives = source.weight_source
    takes = target.weight_sink
    if gives is None or takes is None:
        return False
    if gives.tensors is None:
        return False
    return takes.tensors is not None


def why_no_broadcast(
    source: NodeColumns,
    target: NodeColumns,
    placed: Placed,
    streams: Mapping[str, str],
    flow: Mapping[str, NodeColumns],
) -> str | None:
    """Return the reason, in words, why no broadcast can take tensors of ``source`` to
    ``target``; None if one can.
    """
    giver = source.node
    taker = target.node
    both = [worker for worker in placed[giver.role] if worker in placed[taker.role]]
    if taken_in_flight(flow, taker):
        return (
            f"each worker of role {taker.role!r} loads them when they have arrived, while it "
            "generates (rollout.in_flight)"
        )
    if not handle_tensors(giver, taker):
        functions = " and ".join(short_name(node.fn) for node in (giver, taker))
        return f"{functions} do not both handle tensors (@columns(stream=...))"
    if taker.lag and streams.get(giver.name) != taker.name and _fit(giver, taker):
        return (
            f"node {taker.name!r} is {steps_behind(taker.lag)} (rollout.max_staleness), and its "
            f"workers also wait for those of role {giver.role!r} elsewhere: give them no role in "
            "common (cluster.placement)"
        )
    if streams.get(giver.name) != taker.name or not {PARAMETER_DTYPE, PARAMETER_SHAPE} <= set(
        source.outputs
    ):
        return (
            f"the table of node {giver.name!r} is saved, has other readers, or does not go whole "
            "to each worker"
        )
    if both:
        return (
            f"worker {both[0]!r} has both roles, {giver.role!r} and {taker.role!r} "
            "(cluster.placement)"
        )
    return None


def _fit(source: Node, target: Node) -> bool:
    if source.weight_source is None or target.weight_sink is None:
        return False
    if source.stored_as or target.stored_as:
        return False
    if target.after != (source.name,):
        return False
    return target.rows is Rows.REPLICATED


def run_order(dag: DAG, streams: Mapping[str, str]) -> list[Node]:
    """Return the nodes in the order of every chain: the DAG's, with the target of a stream right
    after its source.
    """
    targets = set(streams.values())
    order = []
    for node in dag.ordered():
        if node.name in targets:
            continue
        order.append(node)
        if node.name in streams:
            order.append(dag.node(streams[node.name]))
    return order


def links_of_stream(
    name: str,
    flow: Mapping[str, NodeColumns],
    moves: Mapping[str, Move],
    placed: Placed,
    streams: Mapping[str, str],
) -> dict[str, Stream]:
    """Return the Stream link of each worker of the source ``name`` or of its target, the source's
    workers first.
    """
    source = flow[name]
    target = flow[streams[name]]
    edge = next(iter(moves[target.node.name].edges), None)
    giving = placed[source.node.role]
    taking = placed[target.node.role]
    reason = why_no_broadcast(source, target, placed, streams, flow)
    joins = () if reason else (giving[0], *taking)
    links: dict[str, Stream] = {}
    for worker in (*giving, *taking):
        gives = worker in giving
        links[worker] = Stream(
            source.node,
            target.node,
            gives=gives,
            takes=worker in taking,
            inputs=moves[name].inputs if gives else (),
            columns=source.outputs,
            edge=edge,
            joins=joins,
        )
    return links
