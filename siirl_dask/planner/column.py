"""A column on its way along the DAG, and which columns a node's function reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from siirl_dask.planner.node import Node
from siirl_dask.schema import DataType, is_blob

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

    @property
    def is_blob(self) -> bool:
        return is_blob(self.type)

    @property
    def is_blob_of_groups(self) -> bool:
        """Whether it is a blob that all rows of a group share."""
        if not self.of_groups:
            return False
        return self.is_blob


def columns_read(node: Node, available: Mapping[str, Column]) -> tuple[str, ...]:
    """Return the columns that a node's function reads among the available ones."""
    contract = node.contract
    columns = list(contract.reads)
    for name in (*contract.optional, *contract.if_written, *contract.one_of):
        if name not in available:
            continue
        if name in contract.if_written and available[name].writer == DATA:
            continue
        columns.append(name)
    return tuple(columns)
