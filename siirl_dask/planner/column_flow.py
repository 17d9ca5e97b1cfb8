"""What flows along a DAG: which columns and rows reach each node, who wrote them, and who still reads them.

Columns go along the edges of the DAG, from node to node. Blobs (binary values: images and the like) do not: a node that
has no use for one is left out, and whoever reads it gets it straight from the last node that has it in its table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.dag import DAG, Node
from siirl_dask.schema import IDENTITY, TYPES, DataType, Schema

DATA = "data"
"""The dataloader, as the source of the columns that entry nodes read."""


@dataclass(frozen=True, slots=True)
class Column:
    """``writer`` is the node that wrote it last, or DATA."""

    name: str
    writer: str
    type: DataType


@dataclass(frozen=True, slots=True)
class Stage:
    """What a node sees and gives, by column name."""

    node: Node
    available: Mapping[str, Column]
    """Before the node runs."""
    output: Mapping[str, Column]
    """After it ran, everything."""
    needed: tuple[str, ...]
    """Columns the node must be given: what it reads, and what others after it still read of its table."""
    providers: Mapping[str, str]
    """The node that each needed column is taken from: a parent, or for a blob the last node above that has it. A column
    travels along one branch of a diamond only.
    """
    kept: tuple[str, ...]
    """Columns of its output that somebody reads or keeps; the rest is dropped as soon as the node has run."""
    rows: str
    """Which rows its input has: DATA, or the name of the node that made them."""
    rows_out: str


def trace(dag: DAG, source: Schema) -> dict[str, Stage]:
    """The stage of every node, parents first. PlanError for a read nobody writes and for joins that cannot be made."""
    available: dict[str, dict[str, Column]] = {}
    output: dict[str, dict[str, Column]] = {}
    above: dict[str, set[str]] = {DATA: set()}
    rows: dict[str, str] = {}
    rows_out: dict[str, str] = {}
    order = dag.ordered()
    start = {f.name: Column(f.name, DATA, f.type) for f in source} | _identity(DATA)
    _check_draws(order)
    for node in order:
        contract = node.contract
        rows[node.name] = _joined_rows(node, rows_out)
        above[node.name] = {*node.after}.union(*(above[parent] for parent in node.after))
        available[node.name] = _joined_columns(node, output, above) if node.after else dict(start)
        _check_reads(node, available[node.name])
        written = {f.name: Column(f.name, node.name, f.type) for f in contract.writes}
        output[node.name] = (available[node.name] if contract.passes else _identity(node.name)) | written
        rows_out[node.name] = node.name if contract.new_rows else rows[node.name]

    kept, needed, providers = _demand(order, available, output)
    return {
        node.name: Stage(
            node,
            available[node.name],
            output[node.name],
            needed[node.name],
            providers[node.name],
            kept[node.name],
            rows[node.name],
            rows_out[node.name],
        )
        for node in order
    }


def _check_draws(order: tuple[Node, ...]) -> None:
    """Which prompts the next step has depends on what such a node drew, and only its workers know that."""
    entries = [node.name for node in order if not node.after]
    for node in order:
        if node.contract.draws and entries != [node.name]:
            raise PlanError(
                f"{node.label} draws more prompts than a step has, so it must be the only node without parents "
                f"(there are: {entries})"
            )


def _identity(writer: str) -> dict[str, Column]:
    return {name: Column(name, writer, TYPES[name]) for name in IDENTITY}


def _joined_rows(node: Node, rows_out: Mapping[str, str]) -> str:
    made_by = {parent: rows_out[parent] for parent in node.after}
    if len(set(made_by.values())) > 1:
        listed = ", ".join(f"{parent!r} has the rows of {maker!r}" for parent, maker in made_by.items())
        raise PlanError(f"{node.label} joins parents whose rows differ: {listed}; join before the rows change")
    return next(iter(made_by.values()), DATA)


def _joined_columns(
    node: Node, output: Mapping[str, Mapping[str, Column]], above: Mapping[str, set[str]]
) -> dict[str, Column]:
    """A column that one branch passed on and the other wrote anew is the new one."""
    joined: dict[str, Column] = {}
    for parent in node.after:
        for name, column in output[parent].items():
            other = joined.setdefault(name, column)
            if other.writer in (*above[column.writer], DATA):
                joined[name] = column
            elif column.writer not in (other.writer, DATA, *above[other.writer]) and name not in IDENTITY:
                raise PlanError(
                    f"{node.label} joins two columns {name!r}, one from {other.writer!r} and one from "
                    f"{column.writer!r}: give one of them another name"
                )
    return joined


def _check_reads(node: Node, available: Mapping[str, Column]) -> None:
    one_of = node.contract.one_of
    if one_of and not any(name in available for name in one_of):
        raise PlanError(
            f"{node.label} needs one of {list(one_of)}, and no node before it writes any "
            f"(available: {sorted(available)})"
        )
    missing = [name for name in node.contract.reads if name not in available]
    if missing:
        hint = did_you_mean(missing[0], available)
        raise PlanError(
            f"{node.label} reads {missing}, which no node before it writes (available: {sorted(available)}){hint}"
        )


def _demand(
    order: tuple[Node, ...],
    available: Mapping[str, Mapping[str, Column]],
    output: Mapping[str, Mapping[str, Column]],
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]], dict[str, dict[str, str]]]:
    """Walk the DAG backwards: an output column stays if it is kept or if a node after it takes it."""
    wanted: dict[str, set[str]] = {node.name: set(IDENTITY) for node in order}
    kept: dict[str, tuple[str, ...]] = {}
    needed: dict[str, tuple[str, ...]] = {}
    providers: dict[str, dict[str, str]] = {}
    nodes = {node.name: node for node in order}
    givers = _givers(order, output)
    for node in reversed(order):
        contract = node.contract
        if node.save_as:
            wanted[node.name] |= set(output[node.name])
        kept[node.name] = tuple(name for name in output[node.name] if name in wanted[node.name])
        need = {*IDENTITY, *contract.taken(available[node.name])}
        if contract.passes:
            need |= wanted[node.name] - set(contract.writes.names)
        needed[node.name] = tuple(name for name in available[node.name] if name in need)
        providers[node.name] = {
            name: _provider(node, column, _above(node, column, givers, output), nodes)
            for name, column in available[node.name].items()
            if node.after and name in need
        }
        for name, giver in providers[node.name].items():
            wanted[giver].add(name)
    return kept, needed, providers


def _givers(
    order: tuple[Node, ...], output: Mapping[str, Mapping[str, Column]]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """For each node and column of its output, who can give it to those after it: the node, or, where it has no use for
    a blob itself, those above it.
    """
    givers: dict[str, dict[str, tuple[str, ...]]] = {}
    for node in order:
        givers[node.name] = {
            name: _above(node, column, givers, output) if _is_left_out(node, column) else (node.name,)
            for name, column in output[node.name].items()
        }
    return givers


def _above(
    node: Node,
    column: Column,
    givers: Mapping[str, Mapping[str, tuple[str, ...]]],
    output: Mapping[str, Mapping[str, Column]],
) -> tuple[str, ...]:
    """Who gives a node a column, as its last writer wrote it, or an identity column, which is the same in all."""
    name, any_will_do = column.name, column.name in IDENTITY
    having = (
        parent
        for parent in node.after
        if name in givers[parent] and (any_will_do or output[parent][name].writer == column.writer)
    )
    return tuple(dict.fromkeys(giver for parent in having for giver in givers[parent][name]))


def _is_left_out(node: Node, column: Column) -> bool:
    """A blob passes by a node unless it reads, writes or keeps it, or makes other rows, which nobody else can."""
    contract = node.contract
    reads = column.name in contract.taken((column.name,))
    uses = reads or column.writer == node.name or node.save_as is not None
    return is_blob(column.type) and bool(node.after) and not uses and not contract.new_rows


def is_blob(kind: DataType) -> bool:
    """Whether values of this type are binary, or lists or structs with such in them."""
    parts = [kind.field(index).type for index in range(kind.num_fields)]
    return any(map(is_blob, parts)) if parts else "binary" in str(kind)


def _provider(node: Node, column: Column, having: Sequence[str], nodes: Mapping[str, Node]) -> str:
    """Of those who have the column, one that has it for its own use, since it had to be brought there anyway; of a blob
    rather one of the same role, where rows may stay; else the first.
    """
    if is_blob(column.type):
        having = [name for name in having if nodes[name].role == node.role] or having
    contracts = {name: nodes[name].contract for name in having}
    using = (p for p, made in contracts.items() if column.name in made.reads or column.name in made.writes.names)
    return next(using, having[0])
