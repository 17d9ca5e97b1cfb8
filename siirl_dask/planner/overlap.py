"""Finds the nodes that may begin with rows which a node above them has finished, while that one
makes others.

Responses have a long tail of lengths. Where a node adds something to each row by itself
(``@columns(by_row=...)``), and its role works while the worker's own thread does something else
(``@builds(beside=...)``), the short ones need not wait for the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from siirl_dask.planner.chain import EarlyColumns
from siirl_dask.planner.column_flow import NodeColumns
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.moves import Move
from siirl_dask.planner.role_contract import works_beside
from siirl_dask.schema import GROUP_ID, ROW_ID


def find_early(
    dag: DAG, flow: Mapping[str, NodeColumns], moves: Mapping[str, Move]
) -> dict[str, EarlyColumns]:
    """Return the nodes that may begin early, each with the node whose finished rows it takes and
    their columns.

    Both have the same rows on the same workers in the same step, and the one above can tell all
    that the other reads of a row at the row's end.
    """
    found: dict[str, EarlyColumns] = {}
    earlier: list[NodeColumns] = []
    for name, node_columns in flow.items():
        node = node_columns.node
        if (
            node.contract.by_row is not None
            and not node.lag
            and works_beside(dag.role(node.role).build)
        ):
            columns = [column for column in node_columns.reads if column not in (ROW_ID, GROUP_ID)]
            for maker in earlier:
                if moves[maker.node.name].layout != moves[name].layout:
                    continue
                if maker.node.lag or maker.rows_out != node_columns.rows:
                    continue
                if _finished_rows_have(columns, maker, node_columns):
                    found[name] = EarlyColumns(maker.node.name, (ROW_ID, GROUP_ID, *columns))
                    break
        earlier.append(node_columns)
    return found


def _finished_rows_have(columns: Sequence[str], maker: NodeColumns, reader: NodeColumns) -> bool:
    """Return whether finished rows of ``maker`` can have the columns, as the node of ``reader``
    reads them.
    """
    contract = maker.node.contract
    # what it stores for later steps is decided at its end
    if not contract.early or contract.carries is not None:
        return False
    for name in columns:
        made = maker.produced.get(name)
        column = reader.available[name]
        if made is None or made.writer != column.writer:
            return False
        if name in contract.early:
            continue
        if not contract.passes or name not in maker.needed or column.writer == maker.node.name:
            return False
    return True
