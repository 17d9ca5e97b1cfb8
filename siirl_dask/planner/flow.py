"""What flows along a DAG: which columns and rows reach each node, who wrote them, and who still reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from siirl_dask.errors import PlanError, did_you_mean
from siirl_dask.planner.dag import DAG, Contract, Node
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
    """Columns the node must be given: what it reads, and what others after it still read of its output."""
    providers: Mapping[str, str]
    """The parent that each needed column is taken from; a column travels along one branch of a diamond only."""
    kept: tuple[str, ...]
    """Columns of its output that somebody reads or keeps; the rest is dropped as soon as the node has run."""
    rows: str
    """Which rows its input has: DATA, or the name of the node that made them."""
    rows_out: str


def trace(dag: DAG, source: Schema) -> dict[str, Stage]:
    """The stage of every node, parents first. PlanError for a read nobody writes and for joins that cannot be made."""
    available: dict[str, dict[str, Column]] = {}
    output: dict[str, dict[str, Column]] = {}
    rows: dict[str, str] = {}
    rows_out: dict[str, str] = {}
    order = dag.ordered()
    start = {f.name: Column(f.name, DATA, f.type) for f in source} | _identity(DATA)
    for node in order:
        contract = node.contract
        rows[node.name] = _joined_rows(node, rows_out)
        available[node.name] = _joined_columns(node, output) if node.after else dict(start)
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


def _identity(writer: str) -> dict[str, Column]:
    return {name: Column(name, writer, TYPES[name]) for name in IDENTITY}


def _joined_rows(node: Node, rows_out: Mapping[str, str]) -> str:
    made_by = {parent: rows_out[parent] for parent in node.after}
    if len(set(made_by.values())) > 1:
        listed = ", ".join(f"{parent!r} has the rows of {maker!r}" for parent, maker in made_by.items())
        raise PlanError(f"node {node.name!r} joins parents whose rows differ: {listed}; join before the rows change")
    return next(iter(made_by.values()), DATA)


def _joined_columns(node: Node, output: Mapping[str, Mapping[str, Column]]) -> dict[str, Column]:
    joined: dict[str, Column] = {}
    for parent in node.after:
        for name, column in output[parent].items():
            other = joined.setdefault(name, column)
            if other.writer != column.writer and name not in IDENTITY:
                raise PlanError(
                    f"node {node.name!r} joins two columns {name!r}, one from {other.writer!r} and one from "
                    f"{column.writer!r}: give one of them another name"
                )
    return joined


def _check_reads(node: Node, available: Mapping[str, Column]) -> None:
    missing = [name for name in node.contract.reads if name not in available]
    if missing:
        hint = did_you_mean(missing[0], available)
        raise PlanError(
            f"node {node.name!r} reads {missing}, which no node before it writes (available: {sorted(available)}){hint}"
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
    contracts = {node.name: node.contract for node in order}
    for node in reversed(order):
        contract = contracts[node.name]
        if node.keep:
            wanted[node.name] |= set(output[node.name])
        kept[node.name] = tuple(name for name in output[node.name] if name in wanted[node.name])
        need = {*IDENTITY, *contract.reads, *(name for name in contract.optional if name in available[node.name])}
        if contract.passes:
            need |= wanted[node.name] - set(contract.writes.names)
        needed[node.name] = tuple(name for name in available[node.name] if name in need)
        providers[node.name] = {
            name: _provider(name, [p for p in node.after if name in output[p]], contracts)
            for name in needed[node.name]
            if node.after
        }
        for name, parent in providers[node.name].items():
            wanted[parent].add(name)
    return kept, needed, providers


def _provider(column: str, having: Sequence[str], contracts: Mapping[str, Contract]) -> str:
    """A parent that has the column for its own use, since it had to be brought there anyway; else the first."""
    using = (p for p in having if column in contracts[p].reads or column in contracts[p].writes.names)
    return next(using, having[0])
