"""Adds the links that drop tables."""

from __future__ import annotations

from collections.abc import Sequence

from siirl_dask.planner.chain import Drop, Link, LoadPrompts, Recv, Restore, RunNode, Save, Send, Stream


def with_drops(links: Sequence[Link]) -> tuple[Link, ...]:
    """Return ``links`` with a Drop of each table right after the last link that uses it."""
    last_use: dict[str, int] = {}
    for position, link in enumerate(links):
        for table in _uses(link):
            last_use[table] = position
    drops_at: dict[int, list[Drop]] = {}
    for table, position in last_use.items():
        drops_at.setdefault(position, []).append(Drop(table))
    links_and_drops: list[Link] = []
    for position, link in enumerate(links):
        links_and_drops.append(link)
        links_and_drops.extend(drops_at.get(position, ()))
    return tuple(links_and_drops)


def _uses(link: Link) -> tuple[str, ...]:
    match link:
        case LoadPrompts(name):
            return (name,)
        case RunNode(node, inputs):
            return (*(item.table for item in inputs), node.name)
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
