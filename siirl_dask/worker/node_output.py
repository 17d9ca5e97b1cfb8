"""Checks a node's output against its contract."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from siirl_dask.errors import NodeError
from siirl_dask.planner import Groups, Node
from siirl_dask.schema import GROUP_ID, IDENTITY, ROW_ID, TYPES, make_schema


def checked(node: Node, columns: Sequence[str], table: pa.Table, output: object) -> pa.Table:
    """Return ``columns`` of a node's output for ``table``. NodeError when it differs from the
    node's contract.
    """
    if not isinstance(output, pa.Table):
        raise NodeError(
            f"node {node.name!r} gave a {type(output).__name__}: expected a pyarrow Table"
        )
    contract = node.contract
    declared = {name: TYPES[name] for name in IDENTITY}
    declared.update({field.name: field.type for field in contract.writes})
    known = set(declared)
    if contract.passes:
        known.update(table.column_names)
    undeclared = [name for name in output.column_names if name not in known]
    if undeclared:
        raise NodeError(
            f"node {node.name!r} gave columns it does not declare: {undeclared}; add them to its "
            "writes"
        )
    missing = [name for name in columns if name not in output.column_names]
    if missing:
        raise NodeError(
            f"node {node.name!r} did not give {missing} (it gave {output.column_names})"
        )
    schema = make_schema({field.name: field.type for field in output.schema})
    result = output
    if output.schema.types != schema.types:
        result = output.cast(schema)  # to offsets of 64 bits; values are not copied
    for name, kind in declared.items():
        if name in result.column_names and result[name].type != kind:
            raise NodeError(
                f"node {node.name!r} gave {name!r} as {result[name].type}: its contract says {kind}"
            )
    if not contract.new_rows and not _has_same_rows(table, result):
        raise NodeError(
            f"node {node.name!r} changed which rows there are: declare new_rows=True in its "
            "@columns"
        )
    if contract.groups is Groups.KEPT:
        _check_groups(node, table, result)
    return result.select(columns)


def _has_same_rows(table: pa.Table, output: pa.Table) -> bool:
    """Return whether the output has the table's rows, in whatever order."""
    if output[ROW_ID].equals(table[ROW_ID]):
        return True
    same: bool = sorted(output[ROW_ID].to_pylist()) == table[ROW_ID].to_pylist()
    return same


def _check_groups(node: Node, table: pa.Table, output: pa.Table) -> None:
    """Raise NodeError for an output row of a group that no input row is of, and for several output
    rows of a group that one input row is of, unless the node declares ``expand``.
    """
    groups = output[GROUP_ID].to_numpy()
    input_groups = table[GROUP_ID].to_numpy()
    new_groups = np.setdiff1d(groups, input_groups)
    if len(new_groups):
        raise NodeError(
            f"node {node.name!r} gave rows of {len(new_groups)} groups that it had none of (first "
            f"group_id {new_groups[0]}): its contract says groups='kept', and a node that numbers "
            "groups anew declares groups='new'"
        )
    if node.contract.expand is not None:
        return
    repeats_groups = len(groups) > len(np.unique(groups))
    if repeats_groups and len(input_groups) == len(np.unique(input_groups)):
        raise NodeError(
            f"node {node.name!r} gave several rows of a group where it had one: declare expand=..."
        )
