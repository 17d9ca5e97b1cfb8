"""From a DAG and a placement to one chain of links per worker.

Edges whose rows are already where they are wanted stay local. Links follow the DAG's order on every worker and a Send
never waits, so no two workers can wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.chain import Chain, Drop, Edge, Input, Keep, Link, Load, Plan, Recv, Run, Send
from siirl_dask.planner.dag import DAG, Rows
from siirl_dask.planner.flow import DATA, Stage, trace
from siirl_dask.schema import IDENTITY, MINIBATCH, Schema, make_schema


def compile_chains(
    dag: DAG, workers: Sequence[str], source: Schema, placement: Mapping[str, Sequence[int]] | None = None
) -> Plan:
    """Plan ``dag`` on ``workers``. ``placement`` gives each role's workers by index; an unnamed role is on every one.

    PlanError when the column contracts do not hold, or the placement names an unknown role or worker.
    """
    if not workers or len(set(workers)) != len(workers):
        raise PlanError(f"the plan is for workers {list(workers)}: expected names, each once, at least one")
    placed = _place(dag, workers, placement or {})
    stages = trace(dag, source)
    moves = _plan_moves(stages, placed)
    edges = tuple(edge for move in moves.values() for edge in move.edges)
    chains = {worker: Chain(worker, _links(worker, stages, moves, placed)) for worker in workers}
    return Plan(dag, placed, stages, edges, chains)


def _place(dag: DAG, workers: Sequence[str], placement: Mapping[str, Sequence[int]]) -> dict[str, tuple[str, ...]]:
    roles = [role.name for role in dag.roles]
    for role, indices in placement.items():
        if role not in roles:
            raise PlanError(f"the placement names role {role!r}, which the DAG has not{did_you_mean(role, roles)}")
        for index in indices:
            if not 0 <= index < len(workers):
                raise PlanError(f"the placement puts role {role!r} on worker {index}: there are {len(workers)}, from 0")
        if not indices or len(set(indices)) != len(indices):
            raise PlanError(f"the placement puts role {role!r} on {list(indices)}: expected workers, each one once")
    return {role: tuple(workers[i] for i in placement.get(role, range(len(workers)))) for role in roles}


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which row is on which worker. Two equal layouts of the same rows are the same assignment."""

    rows: str
    policy: str
    workers: tuple[str, ...]
    origin: _Layout | None = None
    """The layout that the rows were spread from."""

    @property
    def replicated(self) -> bool:
        return self.policy == Rows.REPLICATED

    @property
    def holders(self) -> tuple[str, ...]:
        """Workers whose parts together are every row once: of replicas, the first one."""
        return self.workers[:1] if self.replicated else self.workers


def _layout(rows: str, policy: str, workers: tuple[str, ...], origin: _Layout | None = None) -> _Layout:
    return _Layout(rows, policy, workers, origin) if len(workers) > 1 else _Layout(rows, "whole", workers)


@dataclass(frozen=True, slots=True)
class _Move:
    """How a node gets its input: the tables it joins, and the edges that bring those that are not there yet."""

    inputs: tuple[Input, ...]
    edges: tuple[Edge, ...]
    holders: tuple[str, ...]
    """Workers whose parts together are the node's output."""


def _plan_moves(stages: Mapping[str, Stage], placed: Mapping[str, tuple[str, ...]]) -> dict[str, _Move]:
    layouts: dict[str, _Layout] = {}
    moves: dict[str, _Move] = {}
    for name, stage in stages.items():
        node, workers = stage.node, placed[stage.node.role]
        if node.after:
            guide = _guide(stage, workers, layouts)
            layout = _wanted(stage, workers, layouts[guide])
            inputs, edges = _bring(stage, layout, guide, layouts, stages)
        else:
            layout = _layout(DATA, "as loaded", workers)
            inputs, edges = (Input(f"{DATA}->{name}", stage.needed),), ()
        layouts[name] = _layout(name, "as made", workers) if node.contract.new_rows else layout
        moves[name] = _Move(inputs, edges, layouts[name].holders)
    return moves


def _guide(stage: Stage, workers: tuple[str, ...], layouts: Mapping[str, _Layout]) -> str:
    """The parent whose rows decide: it knows the mini-batch if that matters, and is in place already if one is."""
    parents = stage.node.after
    if _by_minibatch(stage):
        parents = (stage.providers[MINIBATCH],)
    return next((parent for parent in parents if layouts[parent].workers == workers), parents[0])


def _by_minibatch(stage: Stage) -> bool:
    return stage.node.rows is Rows.BALANCED and MINIBATCH in stage.needed


def _wanted(stage: Stage, workers: tuple[str, ...], guide: _Layout) -> _Layout:
    """The layout a node's input will have."""
    if stage.node.rows is not Rows.ANYWHERE:
        by = f" by the minibatch of {stage.available[MINIBATCH].writer}" if _by_minibatch(stage) else ""
        return _layout(stage.rows, f"{stage.node.rows}{by}", workers)
    if guide.workers == workers:
        return guide
    return _layout(stage.rows, "spread", workers, guide)


def _bring(
    stage: Stage,
    layout: _Layout,
    guide: str,
    layouts: Mapping[str, _Layout],
    stages: Mapping[str, Stage],
) -> tuple[tuple[Input, ...], tuple[Edge, ...]]:
    """The tables a node joins, and an edge from each parent whose rows are not in place."""
    node = stage.node
    in_place = {parent for parent in node.after if layouts[parent] == layout}
    inputs, edges = [], []
    for parent in node.after:
        taken = (name for name, provider in stage.providers.items() if provider == parent and name not in IDENTITY)
        columns = (*IDENTITY, *taken)
        edge = _edge(stage, stages[parent], layouts[parent].holders, layout, columns, guide)
        inputs.append(Input(parent if parent in in_place else edge.name, columns))
        if parent not in in_place:
            edges.append(edge)
    if edges and guide in in_place:
        edges.append(_edge(stage, stages[guide], layouts[guide].holders, layout, (), guide))
    return tuple(inputs), tuple(edges)


def _edge(
    stage: Stage,
    source: Stage,
    sources: tuple[str, ...],
    layout: _Layout,
    columns: tuple[str, ...],
    guide: str,
) -> Edge:
    schema = make_schema({name: source.output[name].type for name in columns})
    target = stage.node
    rows = Rows.REPLICATED if layout.replicated else target.rows  # where the guide is in place and replicated
    return Edge(source.node.name, target.name, sources, layout.workers, rows, _by_minibatch(stage), schema, guide)


def _links(
    worker: str, stages: Mapping[str, Stage], moves: Mapping[str, _Move], placed: Mapping[str, tuple[str, ...]]
) -> tuple[Link, ...]:
    links: list[Link] = []
    outgoing: dict[str, list[Edge]] = {name: [] for name in stages}
    for move in moves.values():
        for edge in move.edges:
            outgoing[edge.source].append(edge)
    for name, stage in stages.items():
        workers = placed[stage.node.role]
        if worker not in workers:
            continue
        index, move = workers.index(worker), moves[name]
        if not stage.node.after:
            links.append(Load(move.inputs[0].table, stage.needed, index, len(workers)))
        guides = {edge.source: edge for edge in move.edges}
        links += [Recv(edge, guides[edge.guide]) for edge in move.edges if edge.moves]
        links.append(Run(stage.node, move.inputs, stage.kept))
        if worker in move.holders:
            links += [Send(edge) for edge in outgoing[name]]
            if stage.node.keep:
                links.append(Keep(name, stage.node.keep, move.holders.index(worker), len(move.holders)))
    return _with_drops(links)


def _with_drops(links: Sequence[Link]) -> tuple[Link, ...]:
    """Each table is dropped right after the last link that uses it."""
    last: dict[str, int] = {}
    for position, link in enumerate(links):
        for table in _uses(link):
            last[table] = position
    dropped_at: dict[int, list[Drop]] = {}
    for table, position in last.items():
        dropped_at.setdefault(position, []).append(Drop(table))
    return tuple(item for position, link in enumerate(links) for item in (link, *dropped_at.get(position, ())))


def _uses(link: Link) -> tuple[str, ...]:
    match link:
        case Load(name):
            return (name,)
        case Run(node, inputs):
            return (*(item.table for item in inputs), node.name)
        case Send(edge):
            return (edge.source,)
        case Recv(edge):
            return (edge.name,)
        case Keep(node):
            return (node,)
    return ()
