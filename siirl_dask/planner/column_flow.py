"""Column flow: finds the columns and rows that reach each node of a DAG, their writers and their
readers.

Columns go along the edges of the DAG, from node to node. Blobs (binary values, such as images) skip
the nodes that do not use them: a reader takes a blob straight from the last node whose table holds
it. Where a table has several rows of a group, which share a blob, nodes below take it by group,
from the last table above that holds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.column import DATA, Column, columns_read
from siirl_dask.planner.column_sources import chosen_source, find_suppliers, suppliers_above
from siirl_dask.planner.contract import Groups
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.node import Node
from siirl_dask.schema import IDENTITY, TYPES, Schema, make_schema, missing_step, type_at


@dataclass(frozen=True, slots=True)
class NodeColumns:
    """One node's input and output columns, by name."""

    node: Node
    available: Mapping[str, Column]
    """Columns that could reach the node."""
    produced: Mapping[str, Column]
    """Columns of the node's table after it ran, used or not."""
    needed: tuple[str, ...]
    """Columns that the node is given: those it reads, and those that later nodes read from its
    table."""
    sources: Mapping[str, str]
    """Node that each needed column is taken from: a parent, or for a blob the last node above that
    has it. A column travels along one branch of a diamond only.
    """
    outputs: tuple[str, ...]
    """Columns of ``produced`` that a later node reads or the run stores; the others are dropped
    at once."""
    rows: str
    """Origin of the input's rows: DATA, or the name of the node that made them."""
    rows_out: str
    """Origin of the output's rows."""
    by_group: frozenset[str] = frozenset()
    """Needed columns that have one value for each group where they are taken from, or may have:
    they go by group."""
    one_a_group: bool = False
    """True if the output has one row of a group at most."""

    @property
    def reads(self) -> tuple[str, ...]:
        """Columns that the node's function reads among the available ones."""
        return columns_read(self.node, self.available)

    @property
    def shared_blobs(self) -> tuple[str, ...]:
        """Blobs of the output that rows of a group share: they are stored once per group."""
        if self.one_a_group:
            return ()
        columns = [self.produced[name] for name in self.outputs]
        return tuple(column.name for column in columns if column.is_blob_of_groups)


def trace_columns(dag: DAG, source: Schema) -> dict[str, NodeColumns]:
    """Return the columns of every node, parents first.

    PlanError for a column that is read and never written, and for parents that cannot be joined.
    """
    available: dict[str, dict[str, Column]] = {}
    produced: dict[str, dict[str, Column]] = {}
    above: dict[str, set[str]] = {DATA: set()}
    rows: dict[str, str] = {}
    rows_out: dict[str, str] = {}
    single: dict[str, bool] = {}
    order = dag.ordered()
    dataset = {field.name: Column(field.name, DATA, field.type, of_groups=True) for field in source}
    dataset.update(_named_fields(order, source))
    dataset.update(_identity(DATA))
    _check_draws(order)
    for node in order:
        name = node.name
        rows[name] = _joined_rows(node, rows_out)
        above[name] = set(node.after)
        for parent in node.after:
            above[name] |= above[parent]
        if node.after:
            available[name] = _joined_columns(node, produced, above)
        else:
            available[name] = dict(dataset)
        _check_reads(node, available[name])
        single[name] = _one_a_group(node, single)
        produced[name] = _output_columns(node, available[name], one_a_group=single[name])
        rows_out[name] = name if node.contract.new_rows else rows[name]

    outputs, needed, sources = _demand(order, available, produced, single)
    flow = {}
    for node in order:
        name = node.name
        by_group = set()
        for column_name, supplier in sources[name].items():
            column = available[name][column_name]
            if not column.is_blob_of_groups:
                continue
            if rows_out[supplier] != rows[name] or not single[supplier]:
                by_group.add(column_name)
        flow[name] = NodeColumns(
            node,
            available=available[name],
            produced=produced[name],
            needed=needed[name],
            sources=sources[name],
            outputs=outputs[name],
            rows=rows[name],
            rows_out=rows_out[name],
            by_group=frozenset(by_group),
            one_a_group=single[name],
        )
    return flow


def _named_fields(order: Sequence[Node], source: Schema) -> dict[str, Column]:
    """Return the fields of the dataset's structs that nodes read by their paths, such as
    ``extra_info.source``, as columns of these names.
    """
    named = {}
    for node in order:
        contract = node.contract
        for path in (*contract.reads, *contract.optional, *contract.one_of):
            if path in source.names:
                continue
            kind = type_at(source, path)
            if kind is not None:
                named[path] = Column(path, DATA, kind, of_groups=True)
    return named


def _output_columns(
    node: Node, available: Mapping[str, Column], *, one_a_group: bool
) -> dict[str, Column]:
    """Return the columns of a node's table: those that it passes on, and then those that it
    writes.
    """
    contract = node.contract
    columns = {}
    if contract.passes:
        groups_are_known = True
        if contract.new_rows:
            groups_are_known = contract.groups is not None
        for name, column in available.items():
            if name not in contract.drops:
                columns[name] = replace(column, of_groups=column.of_groups and groups_are_known)
    else:
        columns.update(_identity(node.name))
    of_groups = contract.writes.names if one_a_group else contract.of_groups
    for field in contract.writes:
        columns[field.name] = Column(field.name, node.name, field.type, field.name in of_groups)
    return columns


def _check_draws(order: tuple[Node, ...]) -> None:
    """Refuse a node that draws prompts where there are other entry nodes: only its workers know
    where the next step begins.
    """
    entries = [node.name for node in order if not node.after]
    for node in order:
        if node.contract.draws and entries != [node.name]:
            raise PlanError(
                f"{node.label} draws more prompts than a step has, so it must be the only node "
                f"without parents (there are: {entries})"
            )


def _one_a_group(node: Node, single: Mapping[str, bool]) -> bool:
    """Return whether a node's table has at most one row of each group, as the dataset has."""
    contract = node.contract
    if contract.new_rows and (contract.groups is not Groups.KEPT or contract.expand is not None):
        return False
    return all(single[parent] for parent in node.after)


def _identity(writer: str) -> dict[str, Column]:
    return {name: Column(name, writer, TYPES[name]) for name in IDENTITY}


def _joined_rows(node: Node, rows_out: Mapping[str, str]) -> str:
    made_by = {parent: rows_out[parent] for parent in node.after}
    if len(set(made_by.values())) > 1:
        listed = ", ".join(
            f"{parent!r} has the rows of {maker!r}" for parent, maker in made_by.items()
        )
        raise PlanError(
            f"{node.label} joins parents whose rows differ: {listed}; join before the rows change"
        )
    return next(iter(made_by.values()), DATA)


def _joined_columns(
    node: Node, produced: Mapping[str, Mapping[str, Column]], above: Mapping[str, set[str]]
) -> dict[str, Column]:
    """Return the columns of a node's joined parents; a column that one branch rewrote replaces
    the older one.
    """
    joined: dict[str, Column] = {}
    for parent in node.after:
        for name, column in produced[parent].items():
            other = joined.setdefault(name, column)
            if other.writer in (*above[column.writer], DATA):
                joined[name] = column
            elif (
                column.writer not in (other.writer, DATA, *above[other.writer])
                and name not in IDENTITY
            ):
                raise PlanError(
                    f"{node.label} joins two columns {name!r}, one from {other.writer!r} and one "
                    f"from {column.writer!r}: give one of them another name"
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
        types = {name: column.type for name, column in available.items()}
        raise PlanError(
            f"{node.label} reads {missing}, which no node before it writes (available: "
            f"{sorted(available)}){_nearest(make_schema(types), missing[0])}"
        )


def _nearest(schema: Schema, path: str) -> str:
    """Return the end of the message about a path that is not there: where it ends, and a name like
    the missing one.
    """
    step = missing_step(schema, path)
    if step is None:
        return ""
    name, known = step
    hint = did_you_mean(name, known)
    if known == schema.names:
        return hint
    return f": no {name!r} (there is: {known}){hint}"


def _demand(
    order: tuple[Node, ...],
    available: Mapping[str, Mapping[str, Column]],
    produced: Mapping[str, Mapping[str, Column]],
    single: Mapping[str, bool],
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]], dict[str, dict[str, str]]]:
    """Return outputs, needed columns and sources of every node.

    The walk goes backwards: an output column stays if it is stored or if a later node takes it.
    Blobs that the rows of a group share are stored where that is asked for, and in a stage if a
    later node takes them.
    """
    wanted: dict[str, set[str]] = {node.name: set(IDENTITY) for node in order}
    outputs: dict[str, tuple[str, ...]] = {}
    needed: dict[str, tuple[str, ...]] = {}
    sources: dict[str, dict[str, str]] = {}
    nodes = {node.name: node for node in order}
    suppliers = find_suppliers(order, produced, single)
    for node in reversed(order):
        contract = node.contract
        if node.stored_as:
            for name, column in produced[node.name].items():
                if column.is_blob_of_groups and not single[node.name] and not node.save_blobs:
                    continue
                wanted[node.name].add(name)
        outputs[node.name] = tuple(
            name for name in produced[node.name] if name in wanted[node.name]
        )
        need = {*IDENTITY, *columns_read(node, available[node.name])}
        if contract.passes:
            need |= wanted[node.name] - set(contract.writes.names)
        needed[node.name] = tuple(name for name in available[node.name] if name in need)
        sources[node.name] = {}
        if not node.after:
            continue
        for name in needed[node.name]:
            column = available[node.name][name]
            candidates = suppliers_above(node, column, suppliers, produced)
            supplier = chosen_source(node, column, candidates, nodes)
            sources[node.name][name] = supplier
            wanted[supplier].add(name)
    return outputs, needed, sources
