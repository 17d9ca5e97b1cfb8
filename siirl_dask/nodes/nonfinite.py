"""Names numbers that are not finite by worker, micro-batch and row, puts the rows aside, and ends the run where it may
not go on without them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.context import Context, Reduce
from siirl_dask.errors import Aborted, Origin, TrainingError
from siirl_dask.nodes.packed_table import one_chunk
from siirl_dask.schema import ROW_ID
from siirl_dask.training import NonFinite, OnNonFinite

logger = logging.getLogger(__name__)
COLUMN = "nonfinite"
"""Column of a table of rows that were put aside: what is not finite in a row, a list of names."""
_SHOWN = 5  # rows that a message names
_MOST_ROWS, _MOST_BYTES = 1000, 64 * 2**20  # of a worker's part
_MOST_TABLES = 16  # steps of which a worker puts rows aside for one node, in one start of the run
_COUNT = "tables put aside"  # in the node's state

Found = Mapping[str, Sequence[int]]
"""Rows by what is not finite in them."""


def decide(ctx: Context, minibatches: Sequence[pa.Table]) -> OnNonFinite:
    """Return what a trainer calls for a mini-batch that is not finite, one of ``minibatches`` in any epoch.

    The worker's rows of the step's first one are put aside. Then the step is left out, where ``run.on_nan`` and
    ``max_skipped_steps`` allow it. Otherwise TrainingError on the workers where something was found, which names the
    rows, and Aborted on the others.
    """
    put_aside = False

    def on_nonfinite(found: NonFinite) -> None:
        nonlocal put_aside
        table = minibatches[found.minibatch % len(minibatches)]
        where = None
        if not put_aside:
            where, put_aside = _put_aside(ctx, table, found.rows), True
        (workers,) = ctx.all_sum([bool(found.rows)])
        if found.rows:
            said = f"{found}: {_named(ctx, table, found.rows)}{_passes(found)}"
        elif workers:
            said = f"{found}: the rows are another worker's"
        else:
            said = f"{found}: each row's loss is finite, the gradient of all is not{_passes(found)}"
        said += "" if where is None else f"; its rows are in {where}"
        if ctx.skip_nonfinite and found.may_skip:
            if found.rows:
                logger.warning("step %d: %s", ctx.step, said)
            return
        if workers and not found.rows:
            raise Aborted(said)
        raise _error(said + _advice(ctx), table, found.rows)

    return on_nonfinite


def check_finite(ctx: Context, table: pa.Table, *names: str) -> None:
    """Put rows aside that have a number in a column ``names``, one a row or a token, that is not finite.

    Raises TrainingError, with the rows, unless ``run.on_nan=skip``: no step is taken on them then.
    """
    found = {name: rows for name in names if (rows := bad_rows(table[name]))}
    if not found:
        return
    for name, rows in found.items():
        ctx.log(f"nonfinite/{name}", len(rows), Reduce.SUM)
    where = _put_aside(ctx, table, found)
    said = _named(ctx, table, found) + ("" if where is None else f"; these and others of its rows are in {where}")
    if not ctx.skip_nonfinite:
        raise _error(said + _advice(ctx), table, found)
    logger.warning("step %d: %s", ctx.step, said)


def bad_rows(column: pa.ChunkedArray) -> list[int]:
    """Return the rows of a column of numbers, or of lists of numbers, that have one which is not finite."""
    array = one_chunk(column)
    if pa.types.is_large_list(array.type) or pa.types.is_list(array.type):
        parents, numbers = pc.list_parent_indices(array), pc.list_flatten(array)
        places = pc.indices_nonzero(pc.invert(pc.is_finite(numbers)))
        return sorted(set(parents.take(places).to_pylist()))
    rows: list[int] = pc.indices_nonzero(pc.fill_null(pc.invert(pc.is_finite(array)), False)).to_pylist()
    return rows


def _error(text: str, table: pa.Table, found: Found) -> TrainingError:
    error = TrainingError(text)
    error.origin = Origin(rows=_ids(table, found))
    return error


def _ids(table: pa.Table, found: Found) -> tuple[int, ...]:
    """Return the ids of the first rows in which something was found."""
    rows = sorted({row for rows in found.values() for row in rows})[:_SHOWN]
    return tuple(table[ROW_ID][row].as_py() for row in rows)


def _named(ctx: Context, table: pa.Table, found: Found) -> str:
    """Return what is not finite, on which worker, in which rows."""
    count = len({row for rows in found.values() for row in rows})
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    ids = ", ".join(map(str, _ids(table, found)))
    shown = f"row{'s' if count > 1 else ''} {ids}{more} of {table.num_rows}"
    return f"{' and '.join(found)} not finite on worker {ctx.device.worker!r} in {shown}"


def _passes(found: NonFinite) -> str:
    if not found.micro_batches:
        return ""
    numbers = [str(at + 1) for at in found.micro_batches[:_SHOWN]]
    return f", micro-batch{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _advice(ctx: Context) -> str:
    if ctx.skip_nonfinite:
        return " (run.on_nan=skip leaves out no more than trainer.max_skipped_steps in a row)"
    return " (run.on_nan=stop; skip would leave this update out)"


def _put_aside(ctx: Context, table: pa.Table, found: Found) -> str | None:
    """Write the rows with what is not finite in each, those that are not first; all that fit into bounds."""
    if ctx.state.get(_COUNT, 0) >= _MOST_TABLES:
        return None
    ctx.state[_COUNT] = ctx.state.get(_COUNT, 0) + 1
    names: dict[int, list[str]] = {}
    for name, rows in found.items():
        for row in dict.fromkeys(rows):
            names.setdefault(row, []).append(name)
    order = sorted(range(table.num_rows), key=lambda row: row not in names)
    kept = table.take(order[: _fitting(table)])
    reasons = [names.get(row, []) for row in order[: kept.num_rows]]
    return ctx.put_aside(kept.append_column(COLUMN, pa.array(reasons, pa.list_(pa.string()))))


def _fitting(table: pa.Table) -> int:
    """Return the number of rows that are put aside, by their mean size."""
    return min(_MOST_ROWS, int(table.num_rows * min(1.0, _MOST_BYTES / max(1, table.nbytes))) or 1)
