"""Upper bounds of the rows and bytes that a plan moves in a step, for readers of a plan; no
decision uses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from siirl_dask.planner.chain import Edge, Plan
from siirl_dask.planner.column import DATA
from siirl_dask.planner.contract import option_at
from siirl_dask.planner.node import Node, Rows
from siirl_dask.schema import (
    ADVANTAGES,
    COLLISION_PROBS,
    COVARIANT,
    ENTROPIES,
    FINISH_REASON,
    HIGH_ENTROPY,
    IDENTITY,
    KL_PENALTY,
    OLD_LOGPROBS,
    PLAIN_RESPONSE,
    PROMPT_IDS,
    PROMPT_TEXT,
    REFERENCE_LOGPROBS,
    RESPONSE,
    RESPONSE_IDS,
    RESPONSE_MASK,
    RETURNS,
    ROLLOUT_LOGPROBS,
    TOKEN_VERSIONS,
    VALUES,
    WORKER,
    DataType,
    Schema,
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Upper bounds of an edge's rows and bytes, None without a bound; columns in ``unknown`` are
    not counted.
    """

    rows: int | None
    bytes: int | None
    unknown: tuple[str, ...] = ()


def estimate(plan: Plan, sizes: TableSizes) -> dict[tuple[str, ...], Estimate]:
    """Return the estimate of each edge of the DAG, and of each edge that brings blobs, by its ends
    (``Edge.ends``).

    Bytes are those of values and offsets, 0 where rows stay in place. By group a row is one of a
    group.
    """
    rows = rows_made(plan, sizes)
    moving = {edge.ends: edge for edge in plan.edges if edge.moves}
    estimates: dict[tuple[str, ...], Estimate] = {}
    for target, node_columns in plan.flow.items():
        for source in dict.fromkeys((*node_columns.node.after, *node_columns.sources.values())):
            edge = moving.get((source, target))
            of_groups = moving.get((source, target, "by group"))
            if of_groups is not None:
                types = {field.name: field.type for field in of_groups.schema}
                groups = groups_of(plan, sizes, of_groups, rows)
                copies = most_takers(of_groups, groups, rows[node_columns.rows])
                estimates[of_groups.ends] = _rows_of_widths(plan, sizes, types, groups, copies)
            if edge is None:
                if of_groups is None or source in node_columns.node.after:
                    estimates[source, target] = Estimate(rows[node_columns.rows], 0)
                continue
            copies = 1
            if edge.rows is Rows.REPLICATED:
                copies = len(edge.targets)
            types = {field.name: field.type for field in edge.schema}
            if node_columns.rows in sizes.totals:
                made = plan.flow[node_columns.rows].node.contract.writes.names
                unknown = tuple(name for name in types if name not in (*made, *IDENTITY))
                estimates[source, target] = Estimate(
                    rows[node_columns.rows], copies * sizes.totals[node_columns.rows], unknown
                )
            else:
                estimates[source, target] = _rows_of_widths(
                    plan, sizes, types, rows[node_columns.rows], copies
                )
    return estimates


def groups_of(
    plan: Plan,
    sizes: TableSizes,
    edge: Edge,
    rows: Mapping[str, int | None],
) -> int | None:
    """Return the most groups that an edge by group moves; ``rows`` are those of ``rows_made``."""
    made = rows[plan.flow[edge.source].rows_out]
    if made is None:
        return None
    return min(made, sizes.prompts)


def most_takers(edge: Edge, groups: int | None, rows: int | None) -> int:
    """Return how many targets take a group at most: no more than it has rows, of the ``rows`` at
    the target.
    """
    if edge.rows is Rows.GROUPED:
        return 1
    if edge.rows is Rows.REPLICATED or not groups or rows is None:
        return len(edge.targets)
    return min(len(edge.targets), -(-rows // groups))


def _rows_of_widths(
    plan: Plan,
    sizes: TableSizes,
    types: Mapping[str, DataType],
    rows: int | None,
    copies: int,
) -> Estimate:
    longest = max(len(worker.encode()) for worker in plan.chains)
    widths = {name: width_of(name, kind, sizes, longest) for name, kind in types.items()}
    unknown = tuple(name for name, width in widths.items() if width is None)
    known = sum(width.bytes for width in widths.values() if width is not None)
    return Estimate(rows, None if rows is None else rows * copies * known, unknown)


def travelling_bytes(
    schema: Schema, sizes: TableSizes, longest_worker: int
) -> tuple[int, tuple[str, ...]]:
    """Return the most bytes of a row that go from worker to worker, and the columns without a
    bound.

    Identity columns and the lengths of lists and texts do not count: they travel with the
    statistics.
    """
    total = 0
    unknown: list[str] = []
    for column in schema:
        if column.name in IDENTITY:
            continue
        width = width_of(column.name, column.type, sizes, longest_worker)
        if width is None:
            unknown.append(column.name)
            continue
        total += width.bytes
        if column.name not in sizes.widths and not _is_fixed(column.type):
            total -= _OFFSET
    return total, tuple(unknown)


def rows_made(plan: Plan, sizes: TableSizes) -> dict[str, int | None]:
    """Return the rows over all workers by the node that made them; None without a bound."""
    rows: dict[str, int | None] = {DATA: sizes.prompts}
    for name, node_columns in plan.flow.items():
        if node_columns.node.contract.new_rows:
            before = rows[node_columns.rows]
            times = times_of(node_columns.node)
            if before is None or times is None or name in sizes.totals:
                rows[name] = None
            else:
                rows[name] = before * times
    return rows


def times_of(node: Node) -> int | None:
    """Return the most rows that come out of a node for each that goes in; None where nothing bounds
    them.

    A source of weights makes a row for each parameter, however many rows go in.
    """
    if node.weight_source is not None:
        return None
    expand = node.contract.expand
    if expand is None:
        return 1
    paths = [expand] if isinstance(expand, str) else expand
    factors = [option_at(node.fn, path) for path in paths]
    return prod(factors) if all(isinstance(factor, int) for factor in factors) else None


_OFFSET = 8  # bytes per row that Arrow spends on where a list or string ends
_FINISH_REASONS = len("environment")
_PER_RESPONSE_TOKEN = (
    RESPONSE_IDS,
    RESPONSE_MASK,
    ROLLOUT_LOGPROBS,
    OLD_LOGPROBS,
    REFERENCE_LOGPROBS,
    KL_PENALTY,
    VALUES,
    ADVANTAGES,
    RETURNS,
    COVARIANT,
    ENTROPIES,
    COLLISION_PROBS,
    HIGH_ENTROPY,
    TOKEN_VERSIONS,
)
"""List columns with a value for each token of the response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSizes:
    """Upper bounds from which a plan's estimates start."""

    prompts: int
    """Prompts per step, over all workers."""
    prompt_tokens: int
    """Tokens of one prompt."""
    response_tokens: int
    """Tokens of one response."""
    token_bytes: int | None = None
    """Bytes of the text of one token; None leaves text columns without a bound."""
    widths: Mapping[str, int] = field(default_factory=dict)
    """Bytes per row of other columns, by name."""
    totals: Mapping[str, int] = field(default_factory=dict)
    """Bytes of all rows that a node makes, by node; for weights the model's size."""
    pieces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Number of rows that a node makes in all, each worker an equal share, and bytes of the
    largest row; by node."""
    part: int | None = None
    """Largest piece of a streamed table in bytes; a larger row moves alone."""
    buffers: bool = False
    """True if streams that a broadcast can carry go through its buffers, in a worker's own
    memory."""
    minibatches: int = 1
    """Mini-batches in a step."""
    quadratic_from: int = 0
    """Tokens from which balancing counts a row's attention (``data.quadratic_from``); 0: it
    never does."""


@dataclass(frozen=True, slots=True)
class Width:
    """Upper bound of a row's size: ``fixed`` bytes, and ``bits`` for each of up to ``tokens``
    tokens.
    """

    fixed: int
    bits: int = 0
    tokens: int = 0

    @property
    def bytes(self) -> int:
        return self.fixed + -(-self.tokens * self.bits // 8)


def width_of(name: str, kind: DataType, sizes: TableSizes, longest_worker: int) -> Width | None:
    """Return a column's width, None without a bound. ``longest_worker``: bytes of the longest
    worker name.
    """
    if name in sizes.widths:
        return Width(sizes.widths[name])
    if _is_fixed(kind):
        return Width((int(kind.bit_width) + 7) // 8)
    tokens = {
        PROMPT_IDS: sizes.prompt_tokens,
        **dict.fromkeys(_PER_RESPONSE_TOKEN, sizes.response_tokens),
    }
    if name in tokens:
        return Width(_OFFSET, int(kind.value_type.bit_width), tokens[name])
    texts = {
        PROMPT_TEXT: sizes.prompt_tokens,
        RESPONSE: sizes.response_tokens,
        PLAIN_RESPONSE: sizes.response_tokens,
    }
    if name in texts and sizes.token_bytes is not None:
        return Width(_OFFSET, 8 * sizes.token_bytes, texts[name])
    words = {FINISH_REASON: _FINISH_REASONS, WORKER: longest_worker}
    if name in words:
        return Width(_OFFSET + words[name])
    return None


def _is_fixed(kind: DataType) -> bool:
    """Return whether all values of a type have the same width."""
    try:
        return int(kind.bit_width) >= 0
    except ValueError:
        return False
