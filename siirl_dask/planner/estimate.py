"""How many rows and bytes a plan moves in a step, at most. For whoever reads a plan: nothing is decided by it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from siirl_dask.planner.chain import Plan
from siirl_dask.planner.dag import Node, Rows
from siirl_dask.planner.flow import DATA
from siirl_dask.schema import (
    FINISH_REASON,
    IDENTITY,
    OLD_LOGPROBS,
    PROMPT_IDS,
    PROMPT_TEXT,
    REFERENCE_LOGPROBS,
    RESPONSE,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    WORKER,
    DataType,
)

_OFFSET = 4  # bytes per row that Arrow spends on where a list or string ends
_FINISH_REASONS = len("length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Upper bounds that a plan's estimates start from."""

    prompts: int
    """Per step, over all workers."""
    prompt_tokens: int
    """Of one prompt."""
    response_tokens: int
    """Of one response."""
    token_bytes: int | None = None
    """Of the text of one token; None, and columns of text have no known bound."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Bytes per row of other columns, by name."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Bytes of all rows that a node makes, by node: of weights, the model's size."""


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
    rows = _rows(plan, sizes)
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
    widths = {name: _width(name, kind, sizes, plan) for name, kind in types.items()}
    unknown = tuple(name for name, width in widths.items() if width is None)
    known = sum(width for width in widths.values() if width is not None)
    return Estimate(rows, None if rows is None else rows * copies * known, unknown)


def _rows(plan: Plan, sizes: Sizes) -> dict[str, int | None]:
    """Rows over all workers, by who made them. Without ``expand``, a node makes no more than came in."""
    rows: dict[str, int | None] = {DATA: sizes.prompts}
    for name, stage in plan.stages.items():
        contract = stage.node.contract
        if contract.new_rows:
            before = rows[stage.rows]
            times = 1 if contract.expand is None else _option(stage.node, contract.expand)
            rows[name] = None if before is None or times is None or name in sizes.totals else before * times
    return rows


def _option(node: Node, path: str) -> int | None:
    """The number at a dotted path into a node's options, their dataclasses and mappings; None if there is none."""
    fn = getattr(node.fn, "func", node.fn)
    defaults = {p.name: p.default for p in inspect.signature(fn).parameters.values()}
    found: Any = {**defaults, **node.options}
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else getattr(found, part, None)
    return found if isinstance(found, int) else None


def _width(name: str, kind: DataType, sizes: Sizes, plan: Plan) -> int | None:
    """Bytes of one row of a column, at most; None when nothing bounds it."""
    if name in sizes.widths:
        return sizes.widths[name]
    try:
        return (int(kind.bit_width) + 7) // 8
    except ValueError:  # not a type of fixed width
        pass
    per_token = sizes.token_bytes
    tokens = {PROMPT_IDS: sizes.prompt_tokens, RESPONSE_IDS: sizes.response_tokens}
    tokens |= dict.fromkeys((ROLLOUT_LOGPROBS, OLD_LOGPROBS, REFERENCE_LOGPROBS), sizes.response_tokens)
    if name in tokens:
        return _OFFSET + tokens[name] * int(kind.value_type.bit_width) // 8
    texts = {PROMPT_TEXT: sizes.prompt_tokens, RESPONSE: sizes.response_tokens}
    if name in texts and per_token is not None:
        return _OFFSET + texts[name] * per_token
    if name == FINISH_REASON:
        return _OFFSET + _FINISH_REASONS
    return _OFFSET + max(len(worker.encode()) for worker in plan.chains) if name == WORKER else None
