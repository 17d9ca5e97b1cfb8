"""Cuts a DAG at a table that is stored: what a step still has to do when its rows are there.

The node that saves the table, and the nodes before it, are not run again: a node without parents takes their place,
whose rows are read. What follows runs as before. So does a node before it that changes its role's object
(``@columns(stateful=True)``), on the stored rows; and it takes nothing from its parents but stored columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from siirl_dask.errors import PlanError
from siirl_dask.planner.column_flow import Stage, trace_columns
from siirl_dask.planner.contract import bare, columns
from siirl_dask.planner.dag import DAG, Node
from siirl_dask.schema import IDENTITY, TYPES, Schema, make_schema

NO_DATA: Schema = make_schema({name: TYPES[name] for name in IDENTITY})
"""Columns of the dataset for which a cut DAG is planned: it reads none."""


@columns(new_rows=True, passes=False)
def stored_rows(context: Any, rows: Any, *, table: str) -> Any:
    """Stand for rows of the run's table ``table``: the plan has a Restore link for a node with this function."""
    raise AssertionError(f"rows of {table!r} are read by a link of the chain, not by a node")


@dataclass(frozen=True, slots=True)
class Cut:
    """What is left of a DAG where the rows of one table are stored."""

    dag: DAG
    node: str
    """Node that saved the table, whose name the stored rows have."""
    table: str


def cut_at_stored(dag: DAG, source: Schema) -> Cut:
    """Return ``dag`` cut at the last node whose saved table is enough for what follows.

    PlanError when nothing is saved, or none of the saved tables is enough, with the reason.
    """
    stages = trace_columns(dag, source)
    saving = [stage.node for stage in stages.values() if stage.node.save_as]
    if not saving:
        raise PlanError("no node saves its rows (save_as), so a step that was cut short cannot be replayed from them")
    reasons = []
    for node in reversed(saving):
        try:
            return cut_at(dag, stages, node)
        except PlanError as error:
            reasons.append(str(error))
    raise PlanError("; ".join(reasons))


def cut_at(dag: DAG, stages: Mapping[str, Stage], saved: Node) -> Cut:
    """Return ``dag`` without ``saved`` and the nodes before it, whose rows the saved table holds.

    PlanError, with the reason, where a node that is left needs more than the table holds.
    """
    assert saved.save_as is not None
    skipped = _before(dag, saved) | {saved.name}
    for name in skipped:
        if stages[name].node.contract.carries:
            raise PlanError(
                f"node {name!r} keeps rows for later steps, which table {saved.save_as!r} does not hold: a step is "
                "replayed from its checkpoint only (rollout.partial)"
            )
    left = [node for node in dag.ordered() if node.name not in skipped or node.contract.stateful]
    for node in left:
        _check_stored(stages, node, saved, skipped)
    table = stages[saved.name].produced
    held = make_schema({column.name: column.type for column in table.values() if column.name not in IDENTITY})
    entry = Node(saved.name, stored_rows, role=saved.role, writes=held, options={"table": saved.save_as})
    nodes = (entry, *(_attached(node, saved.name, skipped) for node in left if node.name != saved.name))
    return Cut(DAG(dag.roles, nodes), saved.name, saved.save_as)


def is_stored(node: Node) -> bool:
    """Tell whether a node stands for stored rows."""
    return bare(node.fn) is stored_rows


def stored_table(node: Node) -> str:
    """Return the run's table whose rows a node stands for."""
    return str(node.options["table"])


def _before(dag: DAG, node: Node) -> set[str]:
    """Return the names of all nodes that a node comes after."""
    above: set[str] = set()
    waiting = [*node.after]
    while waiting:
        name = waiting.pop()
        if name not in above:
            above.add(name)
            waiting += dag.node(name).after
    return above


def _check_stored(stages: Mapping[str, Stage], node: Node, saved: Node, skipped: set[str]) -> None:
    """Raise PlanError unless all that a node takes from skipped ones is in the saved table, as they made it."""
    stage, held = stages[node.name], stages[saved.name]
    if node.name == saved.name:
        raise PlanError(f"node {node.name!r} saves its rows and changes its role: save the output of a node before it")
    if not node.after and node.name in skipped:
        raise PlanError(f"node {node.name!r} reads the dataset and changes its role: its input is not stored")
    wanted = (name for name, source in stage.sources.items() if source in skipped and name not in IDENTITY)
    for name in wanted:
        column = stage.available[name]
        if name not in held.produced or held.produced[name].writer != column.writer:
            raise PlanError(
                f"node {node.name!r} takes {name!r} as {column.writer!r} makes it, which table {saved.save_as!r} of "
                f"node {saved.name!r} does not hold"
            )
    if any(parent in skipped for parent in node.after) and stage.rows != held.rows_out:
        raise PlanError(f"node {node.name!r} takes other rows than table {saved.save_as!r} holds")


def _attached(node: Node, entry: str, skipped: set[str]) -> Node:
    """Return a node whose skipped parents are replaced by the stored rows; nothing of it is saved again."""
    after = tuple(dict.fromkeys(entry if parent in skipped else parent for parent in node.after))
    return replace(node, after=after, save_as=node.save_as if node.name not in skipped else None)
