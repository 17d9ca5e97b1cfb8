"""Handles numbers that are not finite: names them by worker, micro-batch and row, writes the rows
to the run's folder, and ends the run where it may not go on without them.
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
"""Column of a table of rows that are not finite: what is not finite in a row, a list of names."""
_MAX_NAMED_ROWS = 5  # rows that a message names
_MAX_WRITTEN_ROWS = 1000  # of a worker's part of a table
_MAX_WRITTEN_BYTES = 64 * 2**20
_MAX_TABLES = 16  # steps for which a worker writes a table for one node, in one start of the run
_TABLE_COUNT = "tables put aside"  # in the node's state

BadRows = Mapping[str, Sequence[int]]
"""Indices of rows by what is not finite in them."""


def nonfinite_handler(ctx: Context, minibatches: Sequence[pa.Table]) -> OnNonFinite:
    """Return the function that a trainer calls for a mini-batch that is not finite, one of
    ``minibatches`` in any epoch.

    It writes the worker's rows of the step's first such mini-batch to the run's folder. The
    optimizer step is left out where ``run.on_nan`` and ``max_skipped_steps`` allow it. Otherwise
    the function raises TrainingError on the workers where something was found, which names the
    rows, and Aborted on the others.
    """
    has_written = False

    def on_nonfinite(found: NonFinite) -> None:
        nonlocal has_written
        table = minibatches[found.minibatch % len(minibatches)]
        folder = None
        if not has_written:
            folder = _write_rows(ctx, table, found.rows)
            has_written = True
        (workers_with_rows,) = ctx.all_sum([bool(found.rows)])
        if found.rows:
            message = f"{found}: {_describe(ctx, table, found.rows)}{_micro_batches(found)}"
        elif workers_with_rows:
            message = f"{found}: the rows are another worker's"
        else:
            message = (
                f"{found}: each row's loss is finite, the gradient of all is "
                f"not{_micro_batches(found)}"
            )
        if folder is not None:
            message += f"; its rows are in {folder}"
        if ctx.skip_nonfinite and found.may_skip:
            if found.rows:
                logger.warning("step %d: %s", ctx.step, message)
            return
        if workers_with_rows and not found.rows:
            raise Aborted(message)
        raise _error(message + _advice(ctx), table, found.rows)

    return on_nonfinite


def check_finite(ctx: Context, table: pa.Table, *names: str) -> None:
    """Write the rows to the run's folder that have a number in a column ``names``, one a row or a
    token, that is not finite.

    Raises TrainingError, with the rows, unless ``run.on_nan=skip``: no step is taken on them then.
    """
    bad: dict[str, list[int]] = {}
    for name in names:
        rows = bad_rows(table[name])
        if rows:
            bad[name] = rows
            ctx.log(f"nonfinite/{name}", len(rows), Reduce.SUM)
    if not bad:
        return
    folder = _write_rows(ctx, table, bad)
    message = _describe(ctx, table, bad)
    if folder is not None:
        message += f"; these and others of its rows are in {folder}"
    if not ctx.skip_nonfinite:
        raise _error(message + _advice(ctx), table, bad)
    logger.warning("step %d: %s", ctx.step, message)


def bad_rows(column: pa.ChunkedArray) -> list[int]:
    """Return the rows of a column of numbers, or of lists of numbers, that have one which is not
    finite.
    """
    array = one_chunk(column)
    if pa.types.is_large_list(array.type) or pa.types.is_list(array.type):
        row_of_number = pc.list_parent_indices(array)
        is_finite = pc.is_finite(pc.list_flatten(array))
        bad_numbers = pc.indices_nonzero(pc.invert(is_finite))
        return sorted(set(row_of_number.take(bad_numbers).to_pylist()))
    is_bad = pc.fill_null(pc.invert(pc.is_finite(array)), False)
    rows: list[int] = pc.indices_nonzero(is_bad).to_pylist()
    return rows


def _error(text: str, table: pa.Table, bad: BadRows) -> TrainingError:
    error = TrainingError(text)
    error.origin = Origin(rows=_row_ids(table, bad))
    return error


def _row_ids(table: pa.Table, bad: BadRows) -> tuple[int, ...]:
    """Return the ids of the first few rows that are not finite."""
    rows = sorted({row for rows in bad.values() for row in rows})
    return tuple(table[ROW_ID][row].as_py() for row in rows[:_MAX_NAMED_ROWS])


def _describe(ctx: Context, table: pa.Table, bad: BadRows) -> str:
    """Return what is not finite, on which worker, in which rows, for a message."""
    count = len({row for rows in bad.values() for row in rows})
    more = f" and {count - _MAX_NAMED_ROWS} more" if count > _MAX_NAMED_ROWS else ""
    ids = ", ".join(map(str, _row_ids(table, bad)))
    label = "rows" if count > 1 else "row"
    rows = f"{label} {ids}{more} of {table.num_rows}"
    return f"{' and '.join(bad)} not finite on worker {ctx.device.worker!r} in {rows}"


def _micro_batches(found: NonFinite) -> str:
    """Return the numbers of the micro-batches for a message; empty where none is known."""
    if not found.micro_batches:
        return ""
    numbers = [str(index + 1) for index in found.micro_batches[:_MAX_NAMED_ROWS]]
    return f", micro-batch{'es' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _advice(ctx: Context) -> str:
    if ctx.skip_nonfinite:
        return " (run.on_nan=skip leaves out no more than trainer.max_skipped_steps in a row)"
    return " (run.on_nan=stop; skip would leave this update out)"


def _write_rows(ctx: Context, table: pa.Table, bad: BadRows) -> str | None:
    """Write rows with what is not finite in each, the bad ones first, as many as fit into the
    limits.

    Returns the folder; None where nothing was written.
    """
    count = ctx.state.get(_TABLE_COUNT, 0)
    if count >= _MAX_TABLES:
        return None
    ctx.state[_TABLE_COUNT] = count + 1
    names_of_row: dict[int, list[str]] = {}
    for name, rows in bad.items():
        for row in dict.fromkeys(rows):
            names_of_row.setdefault(row, []).append(name)
    order = sorted(range(table.num_rows), key=lambda row: row not in names_of_row)
    written = order[: _row_limit(table)]
    reasons = [names_of_row.get(row, []) for row in written]
    return ctx.dump_nonfinite(
        table.take(written).append_column(COLUMN, pa.array(reasons, pa.list_(pa.string())))
    )


def _row_limit(table: pa.Table) -> int:
    """Return the number of rows to write, from the mean size of a row; at least 1."""
    fraction = min(1.0, _MAX_WRITTEN_BYTES / max(1, table.nbytes))
    rows = int(table.num_rows * fraction)
    return min(_MAX_WRITTEN_ROWS, max(1, rows))
