"""A plan as plain data, for ``siirl-dask plan --format json``. docs/dags.md describes the keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from siirl_dask.planner import (
    Chain,
    Edge,
    Estimate,
    Link,
    LoadPrompts,
    Plan,
    Recv,
    Restore,
    RunNode,
    Save,
    SaveState,
    Send,
    Stream,
    TableSizes,
    dag_to_spec,
    estimate,
)
from siirl_dask.schema import IDENTITY


def as_data(plan: Plan, sizes: TableSizes) -> dict[str, Any]:
    """Return a plan as dicts, lists, texts and numbers. ``dag_from_spec`` reads the entry
    ``dag``.
    """
    moving = {edge.ends: edge for edge in plan.edges}
    return {
        "prompts": sizes.prompts,
        "workers": list(plan.chains),
        "placement": {role: list(workers) for role, workers in plan.placement.items()},
        "dag": dag_to_spec(plan.dag),
        "contracts": {
            name: {
                "reads": list(node_columns.reads),
                "writes": {
                    field.name: str(field.type) for field in node_columns.node.contract.writes
                },
            }
            for name, node_columns in plan.flow.items()
        },
        "chains": _chains(plan.chains),
        "edges": [
            _edge(plan, ends, moving.get(ends), size)
            for ends, size in estimate(plan, sizes).items()
        ],
    }


def _chains(chains: Mapping[str, Chain]) -> list[dict[str, Any]]:
    """Return the chains; workers with equal chains are listed once. Their parts of a table
    follow from the rank.
    """
    workers_of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for worker, chain in chains.items():
        steps = tuple(step for link in chain.flat for step in _link(link))
        workers_of.setdefault(steps, []).append(worker)
    listed = []
    for steps, workers in workers_of.items():
        links = [{"do": do, "what": what} for do, what in steps]
        listed.append({"workers": workers, "links": links})
    return listed


def _link(link: Link) -> tuple[tuple[str, str], ...]:
    match link:
        case LoadPrompts(name):
            return (("load", name),)
        case RunNode(node, early=early):
            run = ("run", node.name)
            if early is None:
                return (run,)
            return (run, ("begin", f"{node.name} with finished rows of {early.node}"))
        case Restore(node, table):
            return (("restore", f"{node.name} from {table}"),)
        case Send(edge):
            return (("send", edge.name),)
        case Recv(edge):
            return (("receive", edge.name),)
        case Save(table=table) | SaveState(table=table):
            return (("keep", table),)
        case Stream(source, target, gives, takes):
            steps = []
            if gives:
                steps.append(("give in parts", source.name))
            if takes:
                steps.append(("take in parts", target.name))
            return tuple(steps)
    return ()  # a drop: every table goes right after its last use


def _edge(plan: Plan, ends: tuple[str, ...], edge: Edge | None, size: Estimate) -> dict[str, Any]:
    source, target = ends[:2]
    node_columns = plan.flow[target]
    moves = False
    if edge is not None:
        moves = bool(edge.moves)
    if edge is not None and moves:
        columns = edge.schema.names
    else:
        columns = [name for name, supplier in node_columns.sources.items() if supplier == source]
    return {
        "source": source,
        "target": target,
        "moves": moves,
        "rows_policy": str(edge.rows if edge else node_columns.node.rows),
        "by_minibatch": edge is not None and edge.by_minibatch,
        "by_group": edge is not None and edge.by_group,
        "guide": edge.guide if edge else None,
        "columns": [name for name in columns if name not in IDENTITY],
        "rows": size.rows,
        "bytes": size.bytes,
        "unknown": list(size.unknown),
    }
