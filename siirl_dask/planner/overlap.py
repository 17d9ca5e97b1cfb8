"""Finds the nodes that may begin with rows which a node above them has finished, while that one makes others.

Responses have a long tail of lengths. Where a node adds something to each row by itself (``@columns(by_row=...)``), and
its role works beside the worker's own thread (``@builds(beside=...)``), the short ones need not wait for the longest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from siirl_dask.planner.chain import Early
from siirl_dask.planner.column_flow import Stage
from siirl_dask.planner.dag import DAG
from siirl_dask.planner.moves import Move
from siirl_dask.planner.role_contract import works_beside
from siirl_dask.schema import GROUP_ID, ROW_ID


def find_early(dag: DAG, stages: Mapping[str, Stage], moves: Mapping[str, Move]) -> dict[str, Early]:
    """Return the nodes that may begin early, each with the node whose finished rows it takes and their columns.

    Both have the same rows on the same workers in the same step, and the one above can tell all that the other reads of
    a row at the row's end.
    """
    found: dict[str, Early] = {}
    for at, (name, stage) in enumerate(stages.items()):
        node = stage.node
        if node.contract.by_row is not None and not node.lag and works_beside(dag.role(node.role).build):
            columns = _read(stage)
            for maker in list(stages.values())[:at]:
                here = moves[maker.node.name].layout == moves[name].layout and maker.rows_out == stage.rows
                if here and not maker.node.lag and _tells(maker, columns, stage):
                    found.setdefault(name, Early(maker.node.name, (ROW_ID, GROUP_ID, *columns)))
    return found


def _read(stage: Stage) -> list[str]:
    return [name for name in stage.reads if name not in (ROW_ID, GROUP_ID)]


def _tells(maker: Stage, columns: Sequence[str], stage: Stage) -> bool:
    """Tell whether finished rows of ``maker`` can have the columns, as the node of ``stage`` reads them."""
    contract = maker.node.contract
    if not contract.early or contract.carries is not None:  # what it keeps for later steps is decided at its end
        return False
    for name in columns:
        made, column = maker.produced.get(name), stage.available[name]
        passed = contract.passes and name in maker.needed and column.writer != maker.node.name
        if made is None or made.writer != column.writer or not (name in contract.early or passed):
            return False
    return True
