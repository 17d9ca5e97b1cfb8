"""The compiler turns a DAG and a placement into one chain of links per worker.

Rows that are already on the wanted workers do not move. Links follow the DAG's order on every
worker and a Send never waits, so no two workers can wait for each other; ``deadlock.py`` checks
every plan for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import (
    Chain,
    Drop,
    EarlyColumns,
    Edge,
    Lagged,
    Link,
    LoadPrompts,
    Plan,
    Recv,
    ReportTable,
    Restore,
    RunNode,
    Save,
    SaveState,
    Send,
    Stream,
)
from siirl_dask.planner.column_flow import NodeColumns, trace_columns
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.deadlock import check_order
from siirl_dask.planner.hosts import Hosts
from siirl_dask.planner.moves import Move, plan_moves
from siirl_dask.planner.node import Node
from siirl_dask.planner.overlap import find_early
from siirl_dask.planner.placement import check_neighbours, place_roles
from siirl_dask.planner.restore import frontiers, is_stored, stored_table
from siirl_dask.planner.weight_streams import find_streams, links_of_stream, stays
from siirl_dask.schema import Schema, make_schema


def compile_chains(
    dag: DAG,
    workers: Sequence[str],
    source: Schema,
    placement: Mapping[str, Sequence[int]] | None = None,
    hosts: Hosts | None = None,
    whole: Collection[str] = (),
    *,
    overlap: bool = True,
) -> Plan:
    """Plan ``dag`` on ``workers``. ``placement`` gives each role's workers by index; an unnamed
    role is on every one.

    ``hosts`` gives the host of each worker; None: all are on one. The ranks of an unnamed role are
    ordered such that groups of its ranks (``@builds(groups=...)``) lie on one host where they can.
    ``whole`` are nodes whose tables are not streamed: iterations of two plans that take rows from
    each other must move them alike. ``overlap``: nodes that work row by row begin with rows that a
    node above them has finished, see ``overlap.py``.

    PlanError when the column contracts do not hold, or the placement names an unknown role or
    worker.
    """
    if not workers or len(set(workers)) != len(workers):
        raise PlanError(
            f"the plan is for workers {list(workers)}: expected names, each once, at least one"
        )
    if hosts is None or len(set(hosts.values())) == 1:
        hosts = {}
    placed = place_roles(dag, workers, placement or {}, hosts)
    check_neighbours(dag, placed)
    flow = trace_columns(dag, source)
    moves = plan_moves(flow, placed, hosts)
    streams = {
        source: target
        for source, target in find_streams(flow, placed).items()
        if source not in whole
    }
    for source_node, target in streams.items():
        if stays(flow[source_node], flow[target], placed):
            moves[target] = replace(moves[target], edges=())
    edges = tuple(edge for move in moves.values() for edge in move.edges)
    early = {}
    if overlap:
        early = find_early(dag, flow, moves)
    output_tables, state_tables = _stored(dag, flow)
    chains = _chains(
        workers,
        flow,
        moves=moves,
        placed=placed,
        streams=streams,
        hosts=hosts,
        early=early,
        output_tables=output_tables,
        state_tables=state_tables,
    )
    plan = Plan(
        dag=dag,
        placement=placed,
        flow=flow,
        edges=edges,
        chains=chains,
        dataset=source,
        streams=streams,
        hosts=hosts,
        whole=frozenset(whole),
        overlap=overlap,
    )
    check_order(plan)
    return plan


def _stored(dag: DAG, flow: Mapping[str, NodeColumns]) -> tuple[dict[str, str], dict[str, str]]:
    """Return two tables of each node, where it has them: the one for its rows, and the one for the
    state that it keeps for later steps.

    Rows are stored where the node saves them for good, or as a stage that a step can go on from;
    states only if there is such a node.
    """
    useful = {cut.node for cut in frontiers(dag, flow)[0]}
    output_tables = {}
    state_tables = {}
    for node in dag.nodes:
        if node.stored_as is not None and (node.save_as is not None or node.name in useful):
            output_tables[node.name] = node.stored_as
        if node.state_table is not None and useful:
            state_tables[node.name] = node.state_table
    return output_tables, state_tables


def _chains(
    workers: Sequence[str],
    flow: Mapping[str, NodeColumns],
    *,
    moves: Mapping[str, Move],
    placed: Mapping[str, tuple[str, ...]],
    streams: Mapping[str, str],
    hosts: Hosts,
    early: Mapping[str, EarlyColumns],
    output_tables: Mapping[str, str],
    state_tables: Mapping[str, str],
) -> dict[str, Chain]:
    """Build the chains node by node; the target of a stream runs at the place of its source.

    ``early`` has what nodes begin with, ``output_tables`` and ``state_tables`` where their rows and
    their state are stored, by node.
    """
    links: dict[str, list[Link]] = {worker: [] for worker in workers}
    outgoing: dict[str, list[Edge]] = {name: [] for name in flow}
    for move in moves.values():
        for edge in move.edges:
            outgoing[edge.source].append(edge)
    stream_targets = set(streams.values())
    for name, node_columns in flow.items():
        if name in stream_targets:
            continue
        node = node_columns.node
        move = moves[name]
        owners = placed[node.role]
        senders = move.layout.senders(hosts)
        run = RunNode(node, move.inputs, node_columns.outputs, early.get(name))
        stream_links: dict[str, Stream] = {}
        if name in streams:
            stream_links = links_of_stream(name, flow, moves, placed, streams)
        for index, worker in enumerate(owners):
            own = links[worker]
            if is_stored(node):
                restored = {name: node_columns.produced[name].type for name in node_columns.outputs}
                restore = Restore(
                    node,
                    stored_table(node),
                    schema=make_schema(restored),
                    index=index,
                    count=len(owners),
                    shared=node_columns.shared_blobs,
                )
                of_node: list[Link] = [restore]
            else:
                if not node.after:
                    prompts = move.inputs[0].table
                    own.append(LoadPrompts(prompts, node_columns.needed, index, len(owners)))
                of_node = _receives(node, move, worker)
                of_node.append(stream_links.get(worker, run))
            if node.lag:
                own.append(Lagged(node.lag, _with_drops(of_node)))
            else:
                own.extend(of_node)
            if worker in senders and name not in streams:
                own.extend(Send(edge) for edge in outgoing[name])
        for worker, stream_link in stream_links.items():
            if worker in owners:
                continue
            of_target: Link = stream_link
            lag = flow[streams[name]].node.lag
            if lag:
                of_target = Lagged(lag, (stream_link,))
            links[worker].append(of_target)
        if name in state_tables:
            table = state_tables[name]
            _add_writes(links, table, owners, partial(SaveState, node, table))
        if name in output_tables:
            table = output_tables[name]
            shared = node_columns.shared_blobs
            save = partial(Save, name, table, shared=shared)
            _add_writes(links, table, move.layout.holders, save)
    return {worker: Chain(worker, _with_drops(own)) for worker, own in links.items()}


def _receives(node: Node, move: Move, worker: str) -> list[Link]:
    """Return the links that pull a node's rows on one of its workers."""
    guides = {edge.source: edge for edge in move.edges if not edge.by_group}
    receives: list[Link] = []
    for edge in move.edges:
        if edge.moves:
            tables: tuple[str, ...] = ()
            if not node.lag:  # the rows of a lagged node are of an earlier step than the tables
                tables = move.group_tables.get((edge.name, worker), ())
            receives.append(Recv(edge, guides[edge.guide], tables))
    return receives


def _add_writes(
    links: Mapping[str, list[Link]],
    table: str,
    writers: Sequence[str],
    write: Callable[[int, int], Link],
) -> None:
    """Let each writer write its part of ``table`` by the link ``write(part, parts)``; all other
    workers report that they have none.
    """
    parts = {worker: index for index, worker in enumerate(writers)}
    for worker, own in links.items():
        if worker in parts:
            own.append(write(parts[worker], len(parts)))
        else:
            own.append(ReportTable(table))


def _with_drops(links: Sequence[Link]) -> tuple[Link, ...]:
    """Return ``links`` with a Drop of each table right after the last link that uses it."""
    last_use: dict[str, int] = {}
    for position, link in enumerate(links):
        for table in _tables_used_by(link):
            last_use[table] = position
    drops_at: dict[int, list[Drop]] = {}
    for table, position in last_use.items():
        drops_at.setdefault(position, []).append(Drop(table))
    links_and_drops: list[Link] = []
    for position, link in enumerate(links):
        links_and_drops.append(link)
        links_and_drops.extend(drops_at.get(position, ()))
    return tuple(links_and_drops)


def _tables_used_by(link: Link) -> tuple[str, ...]:
    match link:
        case LoadPrompts(name):
            return (name,)
        case RunNode(node, inputs):
            tables = [item.table for item in inputs]
            return (*tables, node.name)
        case Stream(inputs=inputs):
            return tuple(item.table for item in inputs)
        case Send(edge):
            return (edge.source,)
        case Recv(edge, have=have):
            return (edge.name, *have)
        case Save(node):
            return (node,)
        case Restore(node):
            return (node.name,)
    return ()
