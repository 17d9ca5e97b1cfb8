"""DAGs of nodes and roles, checked as soon as they are made."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, TypeVar

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.contract import bare, options_of
from siirl_dask.planner.node import Node, Role

_Part = TypeVar("_Part", Node, Role)


@dataclass(frozen=True)
class DAG:
    """Roles and nodes. PlanError for a name that is double or unknown, a role that is not bound, or
    a cycle.

    A DAG is immutable: ``add``, ``replace`` and ``without`` return new ones, as changes of single
    nodes in YAML do.
    """

    roles: tuple[Role, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(self.roles))
        object.__setattr__(self, "nodes", tuple(self.nodes))
        _unique("role", [role.name for role in self.roles])
        names: set[str] = set()
        for node in self.nodes:
            if node.name in names:
                raise PlanError(f"{node.label} is there twice: names are unique")
            names.add(node.name)
        if not self.nodes:
            raise PlanError(
                "the DAG has no nodes: expected at least one; a file takes those of an algorithm "
                "from its base, as in base: siirl_dask:dags/grpo.yaml"
            )
        for node in self.nodes:
            self._check_role(node)
            self._check_parents(node, names)
        self.ordered()  # raises for a cycle

    def _check_role(self, node: Node) -> None:
        roles = {role.name for role in self.roles}
        if node.role not in roles:
            raise PlanError(
                f"{node.label} has role {node.role!r}, which no role binds "
                f"(roles: {sorted(roles)}){did_you_mean(node.role, roles)}"
            )

    def _check_parents(self, node: Node, names: Collection[str]) -> None:
        """Refuse a parent that is none of the nodes ``names``, that is lagged, or that is there
        twice.
        """
        for parent in node.after:
            if parent not in names:
                raise PlanError(
                    f"{node.label} comes after {parent!r}, which is no node "
                    f"(nodes: {sorted(names)}){did_you_mean(parent, names)}"
                )
        for parent in node.after:
            if self.node(parent).lag:
                raise PlanError(
                    f"{node.label} comes after {parent!r}, whose rows are of an earlier step"
                )
        _unique(f"parent of {node.label}:", node.after)

    def node(self, name: str) -> Node:
        """Return the node of that name. PlanError, with the nearest spelling, if there is none."""
        return _named("node", name, self.nodes)

    def role(self, name: str) -> Role:
        """Return the role of that name. PlanError, with the nearest spelling, if there is none."""
        return _named("role", name, self.roles)

    def add(self, *nodes: Node, roles: Sequence[Role] = ()) -> DAG:
        """Return this DAG with more nodes and roles. A role replaces the role of the same name."""
        named = {role.name: role for role in (*self.roles, *roles)}
        return DAG(tuple(named.values()), (*self.nodes, *nodes))

    def replace(self, name: str, **fields: Any) -> DAG:
        """Return this DAG with changed fields of the node ``name``: ``dag.replace("update",
        rows=Rows.BALANCED)``.

        ``options`` are merged over the node's own, key by key; None removes an option that the node
        has. PlanError for an unknown node or field.
        """
        old = self.node(name)
        known = [f.name for f in dataclass_fields(Node) if f.name != "name"]
        for field in fields:
            if field not in known:
                hint = did_you_mean(field, known)
                raise PlanError(f"{old.label} has no field {field!r} (fields: {known}){hint}")
        fn = fields.pop("fn", old.fn)
        changes = {**options_of(fn), **fields.pop("options", {})}
        options = {}
        for key, value in {**old.options, **changes}.items():
            if value is not None or key not in old.options:
                options[key] = value
        nodes = list(self.nodes)
        position = [node.name for node in nodes].index(name)
        nodes[position] = replace(old, fn=bare(fn), options=options, **fields)
        return DAG(self.roles, tuple(nodes))

    def without(self, name: str) -> DAG:
        """Return this DAG without the node ``name``. PlanError if there is none, or if another
        comes after it.
        """
        gone = self.node(name)
        return DAG(self.roles, tuple(node for node in self.nodes if node is not gone))

    def ordered(self) -> tuple[Node, ...]:
        """Return the nodes, parents first, otherwise as written: the same order on every worker."""
        done: dict[str, Node] = {}
        waiting = list(self.nodes)
        while waiting:
            ready = _first_ready(waiting, done)
            if ready is None:
                cycle = " -> ".join(_cycle(waiting))
                raise PlanError(f"the nodes make a cycle: {cycle}")
            node = waiting.pop(ready)
            done[node.name] = node
        return tuple(done.values())


def _named(kind: str, name: str, parts: Sequence[_Part]) -> _Part:
    for part in parts:
        if part.name == name:
            return part
    names = [part.name for part in parts]
    raise PlanError(
        f"{kind} {name!r} is none of the DAG's ({kind}s: {names}){did_you_mean(name, names)}"
    )


def _first_ready(waiting: Sequence[Node], done: Collection[str]) -> int | None:
    """Return the index of the first waiting node whose parents are all ``done``; None if there is
    none.
    """
    for index, node in enumerate(waiting):
        if all(parent in done for parent in node.after):
            return index
    return None


def _unique(label: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise PlanError(f"{label} {name!r} is there twice: names are unique")


def _cycle(nodes: Sequence[Node]) -> list[str]:
    """Return the names along one cycle among nodes that all wait for each other."""
    waiting = {node.name: node for node in nodes}
    path = [nodes[0].name]
    while True:
        parent = next(p for p in waiting[path[-1]].after if p in waiting)
        if parent in path:
            return [parent, *reversed(path[path.index(parent) :])]
        path.append(parent)
