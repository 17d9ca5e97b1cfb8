"""Nodes, roles and the DAG they make: what a user writes, checked as soon as it is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from inspect import signature
from typing import Any

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.canonical import canonical_text, function_name
from siirl_dask.planner.contract import Contract, NodeFn, bare, contract_of, options_of
from siirl_dask.schema import IDENTITY, Schema

BuildFn = Callable[..., Any]
"""``(Device, Rank, **options) -> resource``."""

_NAME = re.compile(r"\w[\w-]*")


class Rows(StrEnum):
    """Where a node wants its rows among the workers of its role."""

    ANYWHERE = "anywhere"
    """Where they are; rows that must move go to whoever has least. The only choice of a node without parents."""
    GROUPED = "grouped"
    """All rows of a group on one worker, tokens balanced."""
    BALANCED = "balanced"
    """Tokens balanced, each mini-batch on its own where the node reads ``minibatch``."""
    REPLICATED = "replicated"
    """All rows on every worker."""


@dataclass(frozen=True, eq=False)
class Role:
    """A model or an engine. ``build(device, rank, **options)`` makes it once on each of its workers."""

    name: str
    build: BuildFn
    at: str = ""
    """Where it is written; for errors."""

    def __post_init__(self) -> None:
        _check_name(f"{self.at}: role" if self.at else "role", self.name)
        function_name(bare(self.build))

    @property
    def key(self) -> str:
        return canonical_text({"name": self.name, "build": self.build})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Role) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True, eq=False)
class Node:
    """One stage of the workflow: a function of a table, run on every worker of its role.

    ``reads`` and ``writes`` come from the function's ``@columns`` unless they are given here. ``keep`` names the table
    of the run in which every worker writes its part of the output.
    """

    name: str
    fn: NodeFn
    role: str
    after: tuple[str, ...] = ()
    rows: Rows = Rows.ANYWHERE
    keep: str | None = None
    reads: tuple[str, ...] | None = None
    writes: Schema | None = None
    behind: int = 0
    """It takes its rows from that many steps before, so that its workers need not wait for the step's own."""
    at: str = ""
    """Where it is written; for errors."""

    def __post_init__(self) -> None:
        _check_name(f"{self.at}: node" if self.at else "node", self.name)
        if isinstance(self.after, str):
            raise PlanError(f"{self.label} has after={self.after!r}: expected a tuple, ({self.after!r},)")
        function_name(bare(self.fn))
        if self.keep is not None:
            _check_name(f"keep of {self.label}:", self.keep)
        if not self.after and self.rows is not Rows.ANYWHERE:
            raise PlanError(f"{self.label} has rows={str(self.rows)!r} and no parents: its rows are as loaded")
        if not isinstance(self.behind, int) or self.behind < 0 or (self.behind and not self.after):
            raise PlanError(f"{self.label} has behind={self.behind!r}: expected steps, and parents that are ahead")
        contract = self.contract
        # Layouts are computed from these; a join would not find its rows if they changed on one branch only.
        if changed := [name for name in contract.writes.names if name in IDENTITY and not contract.new_rows]:
            raise PlanError(f"{self.label} writes {changed} of rows that exist: only new_rows=True may")

    @property
    def label(self) -> str:
        """For errors: where it is written, if that is known, and its name."""
        return f"{self.at}: node {self.name!r}" if self.at else f"node {self.name!r}"

    @property
    def contract(self) -> Contract:
        declared = contract_of(self.fn)
        reads = declared.reads if self.reads is None else tuple(self.reads)
        return replace(declared, reads=reads, writes=declared.writes if self.writes is None else self.writes)

    @property
    def options(self) -> Mapping[str, Any]:
        return options_of(self.fn)

    @property
    def beside(self) -> str | None:
        """A role that must be on each of its workers."""
        option = getattr(bare(self.fn), "__beside__", None)
        if option is None:
            return None
        default = signature(bare(self.fn)).parameters[option].default
        return str(self.options.get(option, default))

    @property
    def gives_parts(self) -> Callable[..., Any] | None:
        """What makes its table in parts, with the node's options."""
        return self._bound("__gives_parts__")

    @property
    def takes_parts(self) -> Callable[..., Any] | None:
        """What takes its table in parts, with the node's options."""
        return self._bound("__takes_parts__")

    @property
    def gives_tensors(self) -> Callable[..., Any] | None:
        """What makes it in tensors, with the node's options."""
        return self._bound("__gives_tensors__")

    @property
    def takes_tensors(self) -> Callable[..., Any] | None:
        """What takes it in tensors, with the node's options."""
        return self._bound("__takes_tensors__")

    def _bound(self, attribute: str) -> Callable[..., Any] | None:
        found = getattr(bare(self.fn), attribute, None)
        return None if found is None else partial(found, **self.options)

    def try_out(self) -> None:
        """PlanError when the node's options fail the trial that its function declares."""
        trial = getattr(bare(self.fn), "__trial__", None)
        if trial is not None:
            try:
                trial(**self.options)
            except Exception as error:  # a user's function may raise anything
                raise PlanError(
                    f"{self.label}: its options fail on a table without rows: {type(error).__name__}: {error}"
                ) from error

    @property
    def key(self) -> str:
        contract = self.contract
        writes = {f.name: str(f.type) for f in contract.writes}
        parts = (self.name, self.fn, self.role, self.after, self.rows, self.keep, contract.reads, writes, self.behind)
        return canonical_text(parts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Node) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@dataclass(frozen=True)
class DAG:
    """Roles and nodes. PlanError when a name is double or unknown, a role is unbound, or the nodes make a cycle."""

    roles: tuple[Role, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", tuple(self.roles))
        object.__setattr__(self, "nodes", tuple(self.nodes))
        _unique("role", [role.name for role in self.roles])
        for index, node in enumerate(self.nodes):
            if any(node.name == other.name for other in self.nodes[:index]):
                raise PlanError(f"{node.label} is there twice: names are unique")
        if not self.nodes:
            raise PlanError("the DAG has no nodes: expected at least one")
        names, roles = {node.name for node in self.nodes}, {role.name for role in self.roles}
        for node in self.nodes:
            if node.role not in roles:
                raise PlanError(
                    f"{node.label} has role {node.role!r}, which no role binds "
                    f"(roles: {sorted(roles)}){did_you_mean(node.role, roles)}"
                )
            for parent in node.after:
                if parent not in names:
                    raise PlanError(
                        f"{node.label} comes after {parent!r}, which is no node "
                        f"(nodes: {sorted(names)}){did_you_mean(parent, names)}"
                    )
            if late := [parent for parent in node.after if self.node(parent).behind]:
                raise PlanError(f"{node.label} comes after {late[0]!r}, whose rows are of an earlier step")
            _unique(f"parent of {node.label}:", node.after)
        self.ordered()

    def node(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)

    def ordered(self) -> tuple[Node, ...]:
        """The nodes, parents first, otherwise as written: the same order on every worker."""
        done: dict[str, Node] = {}
        waiting = list(self.nodes)
        while waiting:
            ready = next((i for i, node in enumerate(waiting) if done.keys() >= set(node.after)), None)
            if ready is None:
                raise PlanError(f"the nodes make a cycle: {' -> '.join(_cycle(waiting))}")
            node = waiting.pop(ready)
            done[node.name] = node
        return tuple(done.values())


def _check_name(what: str, name: object) -> None:
    """Names become parts of file names, dotted config keys and edge names (``a->b``)."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(f"{what} {name!r} is no usable name: expected letters, digits, '_' and '-', as in 'old_logp'")


def _unique(what: str, names: Sequence[str]) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise PlanError(f"{what} {name!r} is there twice: names are unique")


def _cycle(nodes: Sequence[Node]) -> list[str]:
    """The names along one cycle among nodes that all wait for each other."""
    waiting = {node.name: node for node in nodes}
    path = [nodes[0].name]
    while True:
        parent = next(p for p in waiting[path[-1]].after if p in waiting)
        if parent in path:
            return [parent, *reversed(path[path.index(parent) :])]
        path.append(parent)
