"""Column flow: finds the columns and rows that reach each node of a DAG, their writers and their readers.

Columns go along the edges of the DAG, from node to node. Blobs (binary values, such as images) skip the nodes that do
not use them: a reader takes a blob straight from the last node whose table holds it. Where a table has several rows of
a group, which share a blob, nodes below take it by group, from the last table above that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.contract import Groups
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.node import Node
from siirl_dask.schema import IDENTITY, TYPES, DataType, Schema, is_blob

DATA = "data"
"""The dataloader, as the source of the columns that entry nodes read."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column on its way along the DAG. ``writer`` is the last node that wrote it, or DATA."""

    name: str
    writer: str
    type: DataType
    of_groups: bool = False
    """True if all rows of a group have the same value."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One node's input and output columns, by name."""

    node: Node
    available: Mapping[str, Column]
    """Columns that could reach the node."""
    produced: Mapping[str, Column]
    """Columns of the node's table after it ran, used or not."""
    needed: tuple[str, ...]
    """Columns that the node is given: those it reads, and those that later nodes read from its table."""
    sources: Mapping[str, str]
    """Node that each needed column is taken from: a parent, or for a blob the last node above that has it. A column
    travels along one branch of a diamond only.
    """
    outputs: tuple[str, ...]
    """Columns of ``produced`` that a later node reads or the run stores; the others are dropped at once."""
    rows: str
    """Origin of the input's rows: DATA, or the name of the node that made them."""
    rows_out: str
    """Origin of the output's rows."""
    by_group: frozenset[str] = frozenset()
    """Needed columns that have one value for each group where they are taken from, or may have: they go by group."""
    one_a_group: bool = False
    """True if the output has one row of a group at most."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the node's function reads among the available ones."""
        return _taken(self.node, self.available)

    @property
    def shared_blobs(self) -> tuple[str, ...]:
        """Blobs of the output that rows of a group share: they are stored once per group."""
        named = (self.produced[name] for name in self.outputs)
        return () if self.one_a_group else tuple(c.name for c in named if c.of_groups and is_blob(c.type))


def trace_columns(dag: DAG, source: Schema) -> dict[str, Stage]:
    """Return the stage of every node, parents first.

    PlanError for a column that is read and never written, and for parents that cannot be joined.
    """
    available: dict[str, dict[str, Column]] = {}
    produced: dict[str, dict[str, Column]] = {}
    above: dict[str, set[str]] = {DATA: set()}
    rows: dict[str, str] = {}
    rows_out: dict[str, str] = {}
    single: dict[str, bool] = {}
    order = dag.ordered()
    start = {f.name: Column(f.name, DATA, f.type, of_groups=True) for f in source} | _identity(DATA)
    _check_draws(order)
    for node in order:
        contract = node.contract
        rows[node.name] = _joined_rows(node, rows_out)
        above[node.name] = {*node.after}.union(*(above[parent] for parent in node.after))
        available[node.name] = _joined_columns(node, produced, above) if node.after else dict(start)
        _check_reads(node, available[node.name])
        single[node.name] = _one_a_group(node, single)
        written = {
            f.name: Column(f.name, node.name, f.type, single[node.name] or f.name in contract.of_groups)
            for f in contract.writes
        }
        known = contract.groups is not None or not contract.new_rows
        passed = {
            name: replace(column, of_groups=column.of_groups and known)
            for name, column in available[node.name].items()
            if name not in contract.drops
        }
        produced[node.name] = (passed if contract.passes else _identity(node.name)) | written
        rows_out[node.name] = node.name if contract.new_rows else rows[node.name]

    outputs, needed, sources = _demand(order, available, produced, single)
    by_group = {
        node.name: frozenset(
            name
            for name, supplier in sources[node.name].items()
            if (column := available[node.name][name]).of_groups
            and is_blob(column.type)
            and (rows_out[supplier] != rows[node.name] or not single[supplier])
        )
        for node in order
    }
    return {
        node.name: Stage(
            node,
            available[node.name],
            produced[node.name],
            needed[node.name],
            sources[node.name],
            outputs[node.name],
            rows[node.name],
            rows_out[node.name],
            by_group[node.name],
            single[node.name],
        )
        for node in order
    }


def _check_draws(order: tuple[Node, ...]) -> None:
    """Refuse a node that draws prompts beside other entry nodes: only its workers know where the next step begins."""
    entries = [node.name for node in order if not node.after]
    for node in order:
        if node.contract.draws and entries != [node.name]:
            raise PlanError(
                f"{node.label} draws more prompts than a step has, so it must be the only node without parents "
                f"(there are: {entries})"
            )


def _one_a_group(node: Node, single: Mapping[str, bool]) -> bool:
    """Tell whether a node's table has one row of a group at most: that of the dataset has one."""
    contract = node.contract
    if contract.new_rows and (contract.groups is not Groups.KEPT or contract.expand is not None):
        return False
    return all(single[parent] for parent in node.after)


def _identity(writer: str) -> dict[str, Column]:
    return {name: Column(name, writer, TYPES[name]) for name in IDENTITY}


def _joined_rows(node: Node, rows_out: Mapping[str, str]) -> str:
    made_by = {parent: rows_out[parent] for parent in node.after}
    if len(set(made_by.values())) > 1:
        listed = ", ".join(f"{parent!r} has the rows of {maker!r}" for parent, maker in made_by.items())
        raise PlanError(f"{node.label} joins parents whose rows differ: {listed}; join before the rows change")
    return next(iter(made_by.values()), DATA)


def _joined_columns(
    node: Node, produced: Mapping[str, Mapping[str, Column]], above: Mapping[str, set[str]]
) -> dict[str, Column]:
    """Return the columns of a node's joined parents; a column that one branch rewrote replaces the older one."""
    joined: dict[str, Column] = {}
    for parent in node.after:
        for name, column in produced[parent].items():
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
    produced: Mapping[str, Mapping[str, Column]],
    single: Mapping[str, bool],
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]], dict[str, dict[str, str]]]:
    """Return outputs, needed columns and sources of every node.

    The walk goes backwards: an output column stays if it is stored or if a later node takes it. Blobs that the rows of
    a group share are stored where that is asked for, and in a stage if a later node takes them.
    """
    wanted: dict[str, set[str]] = {node.name: set(IDENTITY) for node in order}
    outputs: dict[str, tuple[str, ...]] = {}
    needed: dict[str, tuple[str, ...]] = {}
    sources: dict[str, dict[str, str]] = {}
    nodes = {node.name: node for node in order}
    suppliers = _suppliers(order, produced, single)
    for node in reversed(order):
        contract = node.contract
        if node.stored_as:
            stored = (column for column in produced[node.name].values() if not _is_shared(column, single[node.name]))
            wanted[node.name] |= {*produced[node.name]} if node.save_blobs else {column.name for column in stored}
        outputs[node.name] = tuple(name for name in produced[node.name] if name in wanted[node.name])
        need = {*IDENTITY, *_taken(node, available[node.name])}
        if contract.passes:
            need |= wanted[node.name] - set(contract.writes.names)
        needed[node.name] = tuple(name for name in available[node.name] if name in need)
        sources[node.name] = {
            name: _chosen_source(node, column, _above(node, column, suppliers, produced), nodes)
            for name, column in available[node.name].items()
            if node.after and name in need
        }
        for name, supplier in sources[node.name].items():
            wanted[supplier].add(name)
    return outputs, needed, sources


def _taken(node: Node, available: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the columns that a node's function reads among the available ones."""
    contract = node.contract
    own = (name for name, column in available.items() if name in contract.if_written and column.writer == DATA)
    return contract.taken({*available}.difference(own))


def _suppliers(
    order: tuple[Node, ...], produced: Mapping[str, Mapping[str, Column]], single: Mapping[str, bool]
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return, for each node and column, the nodes that later nodes can take the column from.

    That is the node itself; for a blob that it does not use, the nodes above it.
    """
    suppliers: dict[str, dict[str, tuple[str, ...]]] = {}

    def left_out(node: Node, column: Column) -> bool:
        skips = _is_left_out_by_group if _is_shared(column, single[node.name]) else _is_left_out
        return is_blob(column.type) and bool(node.after) and column.writer != node.name and skips(node, column)

    for node in order:
        suppliers[node.name] = {
            name: _above(node, column, suppliers, produced) if left_out(node, column) else (node.name,)
            for name, column in produced[node.name].items()
        }
    return suppliers


def _above(
    node: Node,
    column: Column,
    suppliers: Mapping[str, Mapping[str, tuple[str, ...]]],
    produced: Mapping[str, Mapping[str, Column]],
) -> tuple[str, ...]:
    """Return the nodes above that hold the column as its last writer left it; identity columns are the same in all."""
    name, any_will_do = column.name, column.name in IDENTITY
    having = (
        parent
        for parent in node.after
        if name in suppliers[parent] and (any_will_do or produced[parent][name].writer == column.writer)
    )
    return tuple(dict.fromkeys(supplier for parent in having for supplier in suppliers[parent][name]))


def _is_left_out(node: Node, column: Column) -> bool:
    """Tell whether a blob skips a node that does not write it: it neither reads nor stores it, nor makes groups."""
    contract = node.contract
    uses = column.name in _taken(node, {column.name: column}) or node.stored_as is not None
    return not uses and (not contract.new_rows or (contract.groups is Groups.KEPT and column.of_groups))


def _is_left_out_by_group(node: Node, column: Column) -> bool:
    """Tell whether a blob skips a node of which several rows share it: what reads it there does not pass it on.

    Stages hold it, once per group, since a step may go on from them.
    """
    contract = node.contract
    holds = node.save_blobs or (node.stage and node.save_as is None)
    return not holds and not (contract.new_rows and contract.groups is Groups.NEW)


def _is_shared(column: Column, single: bool) -> bool:
    """Tell whether several rows of a table share the values of a blob."""
    return column.of_groups and not single and is_blob(column.type)


def _chosen_source(node: Node, column: Column, having: Sequence[str], nodes: Mapping[str, Node]) -> str:
    """Return the node in ``having`` that supplies the column.

    A node that reads or writes the column itself comes first, since its workers hold it anyway. For a blob, nodes of
    the same role come before others, because their rows may stay in place.
    """
    if is_blob(column.type):
        having = [name for name in having if nodes[name].role == node.role] or having
    contracts = {name: nodes[name].contract for name in having}
    using = (p for p, made in contracts.items() if column.name in made.reads or column.name in made.writes.names)
    return next(using, having[0])
