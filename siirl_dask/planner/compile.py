"""The compiler turns a DAG and a placement into one chain of links per worker.

Rows that are already on the wanted workers do not move. Links follow the DAG's order on every worker and a Send never
waits, so no two workers can wait for each other; ``deadlock.py`` checks every plan for that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from siirl_dask.errors import PlanError
from siirl_dask.planner.chain import (
    Chain,
    Early,
    Edge,
    Keep,
    Lagged,
    Link,
    Load,
    Plan,
    Recv,
    Report,
    Restore,
    Run,
    Save,
    Send,
    Stream,
)
from siirl_dask.planner.column_flow import Stage, trace_columns
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.deadlock import check_order
from siirl_dask.planner.drops import with_drops
from siirl_dask.planner.hosts import Hosts
from siirl_dask.planner.moves import Move, plan_moves
from siirl_dask.planner.overlap import find_early
from siirl_dask.planner.placement import check_neighbours, place_roles
from siirl_dask.planner.restore import frontiers, is_stored, stored_table
from siirl_dask.planner.weight_streams import find_streams, stays, why_no_broadcast
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
    """Plan ``dag`` on ``workers``. ``placement`` gives each role's workers by index; an unnamed role is on every one.

    ``hosts`` gives the host of each worker; None: all are on one. The ranks of an unnamed role are ordered such that
    groups of its ranks (``@builds(groups=...)``) lie on one host where they can. ``whole`` are nodes whose tables are
    not streamed: iterations of two plans that take rows from each other must move them alike. ``overlap``: nodes that
    work row by row begin with rows that a node above them has finished, see ``overlap.py``.

    PlanError when the column contracts do not hold, or the placement names an unknown role or worker.
    """
    if not workers or len(set(workers)) != len(workers):
        raise PlanError(f"the plan is for workers {list(workers)}: expected names, each once, at least one")
    hosts = {} if hosts is None or len(set(hosts.values())) == 1 else hosts
    placed = place_roles(dag, workers, placement or {}, hosts)
    check_neighbours(dag, placed)
    stages = trace_columns(dag, source)
    moves = plan_moves(stages, placed, hosts)
    streams = {name: to for name, to in find_streams(stages, placed).items() if name not in whole}
    for source_node, target in streams.items():
        if stays(stages[source_node], stages[target], placed):
            moves[target] = replace(moves[target], edges=())
    edges = tuple(edge for move in moves.values() for edge in move.edges)
    early = find_early(dag, stages, moves) if overlap else {}
    chains = _chains(workers, stages, moves, placed, streams, hosts, early, *_stored(dag, stages))
    plan = Plan(dag, placed, stages, edges, chains, source, streams, hosts, frozenset(whole), overlap)
    check_order(plan)
    return plan


def _stored(dag: DAG, stages: Mapping[str, Stage]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the table of each node whose rows are stored, those that are saved, and stages that are of use; and the
    table of what each node keeps for later steps, where a step can go on from stored rows.
    """
    useful = {cut.node for cut in frontiers(dag, stages)[0]}
    stored = {
        node.name: node.stored_as for node in dag.nodes if node.stored_as and (node.save_as or node.name in useful)
    }
    return stored, {node.name: node.kept_as for node in dag.nodes if node.kept_as and useful}


def _chains(
    workers: Sequence[str],
    stages: Mapping[str, Stage],
    moves: Mapping[str, Move],
    placed: Mapping[str, tuple[str, ...]],
    streams: Mapping[str, str],
    hosts: Hosts,
    early: Mapping[str, Early],
    stored: Mapping[str, str],
    kept: Mapping[str, str],
) -> dict[str, Chain]:
    """Build the chains node by node; the target of a stream runs at the place of its source.

    ``early`` has what nodes begin with, ``stored`` and ``kept`` the tables of what they make and keep, by node.
    """
    links: dict[str, list[Link]] = {worker: [] for worker in workers}
    outgoing: dict[str, list[Edge]] = {name: [] for name in stages}
    for move in moves.values():
        for edge in move.edges:
            outgoing[edge.source].append(edge)
    taking = set(streams.values())
    for name, stage in ((name, stage) for name, stage in stages.items() if name not in taking):
        node, move = stage.node, moves[name]
        streaming = _streaming(stage, stages[streams[name]], moves, placed, streams) if name in streams else {}
        guides = {edge.source: edge for edge in move.edges if not edge.by_group}
        run = Run(node, move.inputs, stage.outputs, early.get(name))
        sends = [Send(edge) for edge in outgoing[name] if not streaming]
        part = {worker: index for index, worker in enumerate(move.layout.holders)}
        senders = move.layout.senders(hosts)
        for index, worker in enumerate(placed[node.role]):
            here, size = links[worker], len(placed[node.role])
            if is_stored(node):
                stored_as, shared = stored_table(node), stage.shared_blobs
                now: list[Link] = [Restore(node, stored_as, _schema_of(stage), index, size, shared)]
            else:
                here += [] if node.after else [Load(move.inputs[0].table, stage.needed, index, size)]
                arriving = (edge for edge in move.edges if edge.moves)
                before = [
                    Recv(edge, guides[edge.guide], () if node.lag else move.here(edge, worker)) for edge in arriving
                ]
                now = [*before, streaming.pop(worker, run)]
            here += [Lagged(node.lag, with_drops(now))] if node.lag else now
            here += sends if worker in senders else []
        for worker, link in streaming.items():  # on workers of the target alone
            lag = stages[streams[name]].node.lag
            links[worker].append(Lagged(lag, (link,)) if lag else link)
        if table := kept.get(name):
            owners = {worker: index for index, worker in enumerate(placed[node.role])}
            for worker, own in links.items():
                keeps = worker in owners
                own.append(Keep(node, table, owners[worker], len(owners)) if keeps else Report(table))
        if table := stored.get(name):
            for worker, own in links.items():
                saving = (part[worker], len(part), stage.shared_blobs) if worker in part else None
                own.append(Report(table) if saving is None else Save(name, table, *saving))
    return {worker: Chain(worker, with_drops(own)) for worker, own in links.items()}


def _schema_of(stage: Stage) -> Schema:
    """Return the columns of a node's table that later nodes read."""
    return make_schema({name: stage.produced[name].type for name in stage.outputs})


def _streaming(
    source: Stage,
    target: Stage,
    moves: Mapping[str, Move],
    placed: Mapping[str, tuple[str, ...]],
    streams: Mapping[str, str],
) -> dict[str, Link]:
    """Return the Stream link of each worker of either node, the source's workers first."""
    edge = next(iter(moves[target.node.name].edges), None)
    giving, taking = placed[source.node.role], placed[target.node.role]
    joins = () if why_no_broadcast(source, target, placed, streams) else (giving[0], *taking)
    return {
        worker: Stream(
            source.node,
            target.node,
            gives=worker in giving,
            takes=worker in taking,
            inputs=moves[source.node.name].inputs if worker in giving else (),
            columns=source.outputs,
            edge=edge,
            joins=joins,
        )
        for worker in dict.fromkeys((*giving, *taking))
    }
