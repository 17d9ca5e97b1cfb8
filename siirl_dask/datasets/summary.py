"""Looks into a dataset: its columns, parts, lengths and some rows, in little memory however
large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import Part

from siirl_dask.datasets.column_paths import extract
from siirl_dask.datasets.importing import check_prompts, is_prompt
from siirl_dask.datasets.inputs import MAX_BATCH_BYTES, InputRows, open_inputs, readable, total_rows
from siirl_dask.datasets.lengths import LengthDistribution, Measure, measure_column
from siirl_dask.datasets.mapping import unify
from siirl_dask.errors import DataError
from siirl_dask.images import normalised
from siirl_dask.tables import decoded_column

_MOST_PIECES = 32  # parts or files that rows are taken from, evenly spaced


@dataclass(slots=True)
class ColumnSummary:
    """A column's values in the rows that were read."""

    type: pa.DataType
    nulls: int = 0
    values: int = 0
    """Values with a size: texts and blobs."""
    size: int = 0
    """Characters of all texts, or bytes of all blobs."""
    longest: int = 0


@dataclass(slots=True)
class DatasetSummary:
    """A table or a file at a URL, in numbers."""

    url: str
    rows: int | None
    """Rows in all; None where only reading all of them would tell."""
    parts: Sequence[Part]
    """The files, of Parquet and Arrow; empty for files of another kind."""
    version: int | None
    """Version of a table of siirl_storage; None for plain files."""
    columns: dict[str, ColumnSummary]
    prompt: str | None
    """Column whose lengths are counted; None where there is none of texts."""
    lengths: LengthDistribution = field(default_factory=LengthDistribution)
    read: int = 0
    """Rows that columns and lengths are taken from."""
    pieces: int = 0
    """Parts or files that these rows are from."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    first_prompt: Any = None
    """The prompt of the first row that was read; None where it is null."""


def summarise(
    url: str,
    *,
    measure: Measure,
    prompt: str | None = None,
    rows: int | None = None,
    samples: int = 3,
    separator: str | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> DatasetSummary:
    """Look into the dataset at ``url``, which may be anything that can be imported.

    Lengths, nulls and samples are those of ``rows`` rows, from the beginnings of evenly spaced
    parts; None: of all rows. ``prompt`` is the column whose lengths ``measure`` counts; None takes
    ``prompt``, or the first one of chats, else of texts. ``separator`` is what CSV files have between columns.

    DataError when it cannot be read, or has no such column.
    """
    inputs = [one.settled() for one in open_inputs(url, separator)]
    schema = unify([(one.name, one.schema) for one in inputs])
    column = prompt
    if not column:
        column = _prompt_of(schema)
    if column is not None:
        check_prompts(schema, column, url)
    snapshots = [one.snapshot for one in inputs if one.snapshot is not None]
    found = DatasetSummary(
        url,
        total_rows(inputs),
        parts=[part for snapshot in snapshots for part in snapshot.parts],
        version=snapshots[0].version if len(snapshots) == len(inputs) == 1 else None,
        columns={one.name: ColumnSummary(one.type) for one in schema},
        prompt=column,
    )
    pieces = _pieces(inputs)
    if rows is not None:
        pieces = _spread(pieces, min(_MOST_PIECES, rows))
    found.pieces = len(pieces)
    whole = True  # where every piece ends before its quota, all rows are read
    for number, (name, batches) in enumerate(pieces):
        quota = None
        if rows is not None:
            quota = rows // len(pieces) + (number < rows % len(pieces))
        left = quota
        wanted = samples // len(pieces) + (number < samples % len(pieces))
        with readable(name):
            for table in _first(batches(), quota):
                wanted -= _look(found, table, measure, wanted)
                if left is not None:
                    left -= table.num_rows
                progress(found.read)
        if left == 0:
            whole = False
    if found.rows is None and whole:
        found.rows = found.read
    return found


def _look(found: DatasetSummary, table: pa.Table, measure: Measure, wanted: int) -> int:
    """Add rows to the summary, up to ``wanted`` of them as samples; return how many those are."""
    for name, summary in found.columns.items():
        column = decoded_column(table[name])
        summary.nulls += column.null_count
        if (sizes := _sizes(column)) is not None and len(sizes) > sizes.null_count:
            summary.values += len(sizes) - sizes.null_count
            summary.size += pc.sum(sizes).as_py()
            summary.longest = max(summary.longest, pc.max(sizes).as_py())
    if found.prompt is not None:
        prompts = extract(table, found.prompt)
        if not found.read and len(prompts):
            found.first_prompt = prompts[0].as_py()
        found.lengths.add(measure_column(prompts, measure))
    found.read += table.num_rows
    taken = table.slice(0, wanted).to_pylist()
    found.samples += taken
    return len(taken)


def _sizes(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return characters of texts, bytes of blobs, and of a row's images, in whatever layout, all
    their bytes.
    """
    kind = column.type
    if (images := _bytes_of_images(column)) is not None:
        return images
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return pc.utf8_length(column)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pc.binary_length(column)
    return None


def _bytes_of_images(column: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """Return the bytes of each row's images; None for a column that holds no structs of bytes
    and path.
    """
    kind = column.type
    entry = kind
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        entry = kind.value_type
    if not pa.types.is_struct(entry) or entry.get_field_index("bytes") < 0:
        return None
    try:
        column = normalised(column)
    except DataError:
        return None  # bytes and path in a struct of somebody else's
    lengths = []
    for chunk in column.chunks:
        sizes = pc.fill_null(pc.binary_length(chunk.flatten().field("bytes")), 0).to_numpy(
            zero_copy_only=False
        )
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        lengths.append(
            pa.array(np.diff(ends[chunk.offsets.to_numpy() - chunk.offsets[0].as_py()]), pa.int64())
        )
    return pa.chunked_array(lengths, pa.int64())


def _prompt_of(schema: pa.Schema) -> str | None:
    if "prompt" in schema.names:
        return "prompt"
    prompts = [one for one in schema if is_prompt(one.type)]
    chats = [one.name for one in prompts if pa.types.is_nested(one.type)]
    names = [*chats, *(one.name for one in prompts)]
    return next(iter(names), None)


_Piece = tuple[str, Callable[[], Iterator[pa.RecordBatch]]]


def _pieces(inputs: Sequence[InputRows]) -> list[_Piece]:
    """Return what can be read by itself: each part with rows, and each input of another kind."""
    pieces: list[_Piece] = []
    for one in inputs:
        if one.snapshot is None:
            pieces.append((one.name, one.batches))
        else:
            cut = [replace(one.snapshot, parts=(part,)) for part in one.snapshot.parts if part.rows]
            pieces += [
                (one.name, partial(piece.batches, max_bytes=MAX_BATCH_BYTES)) for piece in cut
            ]
    return pieces


def _spread(pieces: Sequence[_Piece], most: int) -> list[_Piece]:
    if len(pieces) <= most:
        return list(pieces)
    return [pieces[number * len(pieces) // most] for number in range(most)]


def _first(batches: Iterator[pa.RecordBatch], rows: int | None) -> Iterator[pa.Table]:
    """Yield the first ``rows`` rows, or all for None."""
    if rows is None:
        for batch in batches:
            yield pa.Table.from_batches([batch])
        return
    left = rows
    while left > 0:
        batch = next(batches, None)
        if batch is None:
            return
        first = batch.slice(0, left)
        yield pa.Table.from_batches([first])
        left -= first.num_rows
