"""How many rows and bytes a plan moves in a step, at most. For whoever reads a plan: nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from siirl_dask.planner.chain import Plan
from siirl_dask.planner.contract import option_at
from siirl_dask.planner.dag import Node, Rows
from siirl_dask.planner.flow import DATA
from siirl_dask.planner.widths import Sizes, width_of
from siirl_dask.schema import IDENTITY, DataType


@dataclass(frozen=True, slots=True)
class Estimate:
    """``rows`` and ``bytes`` are upper bounds, None when there is none; the columns in ``unknown`` are not counted."""

    rows: int | None
    bytes: int | None
    unknown: tuple[str, ...] = ()


def estimate(plan: Plan, sizes: Sizes) -> dict[tuple[str, str], Estimate]:
    """What goes along each edge of the DAG, and straight to who reads a blob, by (source, target): bytes of values and
    offsets, 0 where rows stay.
    """
    rows = rows_made(plan, sizes)
    moving = {(edge.source, edge.target): edge for edge in plan.edges if edge.moves}
    found: dict[tuple[str, str], Estimate] = {}
    for target, stage in plan.stages.items():
        for source in dict.fromkeys((*stage.node.after, *stage.providers.values())):
            edge = moving.get((source, target))
            if edge is None:
                found[source, target] = Estimate(rows[stage.rows], 0)
                continue
            copies = len(edge.targets) if edge.rows is Rows.REPLICATED else 1
            types = {field.name: field.type for field in edge.schema}
            if stage.rows in sizes.totals:
                made = plan.stages[stage.rows].node.contract.writes.names
                unknown = tuple(name for name in types if name not in (*made, *IDENTITY))
                found[source, target] = Estimate(rows[stage.rows], copies * sizes.totals[stage.rows], unknown)
            else:
                found[source, target] = _rows_of_widths(plan, sizes, types, rows[stage.rows], copies)
    return found


def _rows_of_widths(plan: Plan, sizes: Sizes, types: Mapping[str, DataType], rows: int | None, copies: int) -> Estimate:
    longest = max(len(worker.encode()) for worker in plan.chains)
    found = {name: width_of(name, kind, sizes, longest) for name, kind in types.items()}
    widths = {name: None if width is None else width.bytes for name, width in found.items()}
    unknown = tuple(name for name, width in widths.items() if width is None)
    known = sum(width for width in widths.values() if width is not None)
    return Estimate(rows, None if rows is None else rows * copies * known, unknown)


def rows_made(plan: Plan, sizes: Sizes) -> dict[str, int | None]:
    """Rows over all workers, by who made them. Without ``expand``, a node makes no more than came in."""
    rows: dict[str, int | None] = {DATA: sizes.prompts}
    for name, stage in plan.stages.items():
        if stage.node.contract.new_rows:
            before, times = rows[stage.rows], times_of(stage.node)
            rows[name] = None if before is None or times is None or name in sizes.totals else before * times
    return rows


def times_of(node: Node) -> int | None:
    """Rows that come out of a node for each that goes in, at most."""
    expand = node.contract.expand
    if expand is None:
        return 1
    times = option_at(node.fn, expand)
    return times if isinstance(times, int) else None
