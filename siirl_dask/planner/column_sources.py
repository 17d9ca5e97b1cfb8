"""Chooses the node that a later one takes a column from: the last parent that holds it. A blob goes
past the nodes that do not use it, and is taken straight from the last node above whose table has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from siirl_dask.planner.column import Column, columns_read
from siirl_dask.planner.contract import Groups
from siirl_dask.planner.node import Node
from siirl_dask.schema import IDENTITY


def find_suppliers(
    order: tuple[Node, ...],
    produced: Mapping[str, Mapping[str, Column]],
    single: Mapping[str, bool],
) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return, for each node and column, the nodes that later nodes can take the column from.

    That is the node itself; for a blob that it does not use, the nodes above it.
    """
    suppliers: dict[str, dict[str, tuple[str, ...]]] = {}
    for node in order:
        suppliers[node.name] = {}
        for name, column in produced[node.name].items():
            if _skips(node, column, one_a_group=single[node.name]):
                suppliers[node.name][name] = suppliers_above(node, column, suppliers, produced)
            else:
                suppliers[node.name][name] = (node.name,)
    return suppliers


def suppliers_above(
    node: Node,
    column: Column,
    suppliers: Mapping[str, Mapping[str, tuple[str, ...]]],
    produced: Mapping[str, Mapping[str, Column]],
) -> tuple[str, ...]:
    """Return the nodes above that hold the column as its last writer left it; identity columns
    are the same in all.
    """
    name = column.name
    found: dict[str, None] = {}  # a set that keeps its order
    for parent in node.after:
        if name not in suppliers[parent]:
            continue
        if name in IDENTITY or produced[parent][name].writer == column.writer:
            found.update(dict.fromkeys(suppliers[parent][name]))
    return tuple(found)


def chosen_source(
    node: Node,
    column: Column,
    candidates: Sequence[str],
    nodes: Mapping[str, Node],
) -> str:
    """Return which of the ``candidates``, nodes that hold the column, supplies it.

    A node that reads or writes the column itself comes first, since its workers hold it anyway. For
    a blob, nodes of the same role come before others, because their rows may stay in place.
    """
    if column.is_blob:
        of_same_role = [name for name in candidates if nodes[name].role == node.role]
        if of_same_role:
            candidates = of_same_role
    for name in candidates:
        contract = nodes[name].contract
        if column.name in contract.reads or column.name in contract.writes.names:
            return name
    return candidates[0]


def _skips(node: Node, column: Column, *, one_a_group: bool) -> bool:
    """Return whether a column goes past a node, to those below it, without being in its table."""
    if not column.is_blob or not node.after or column.writer == node.name:
        return False
    if column.is_blob_of_groups and not one_a_group:
        return _is_left_out_by_group(node)
    return _is_left_out(node, column)


def _is_left_out(node: Node, column: Column) -> bool:
    """Return whether a blob skips a node that does not write it: it neither reads nor stores it,
    nor makes groups.
    """
    contract = node.contract
    if column.name in columns_read(node, {column.name: column}) or node.stored_as is not None:
        return False
    if contract.new_rows:
        if contract.groups is not Groups.KEPT:
            return False
        return column.of_groups
    return True


def _is_left_out_by_group(node: Node) -> bool:
    """Return whether a blob that several rows of a node's table share skips the node, even if the
    node reads it.

    A stage holds it, once per group, since a step may go on from there.
    """
    if node.save_blobs:
        return False
    if node.stage and node.save_as is None:
        return False
    if node.contract.new_rows:
        return node.contract.groups is not Groups.NEW
    return True
