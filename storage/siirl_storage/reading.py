"""Reads rows of a part batch by batch, with a bound on the bytes that they take once decoded.

A file says little about its size: dictionaries, runs and compression let a kilobyte become a
gigabyte. So the size that a Parquet footer tells is compared with the bound before anything is
decoded, and what comes out is counted on the way.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from siirl_storage.errors import CorruptPart, TooLarge
from siirl_storage.files import full_name, open_input
from siirl_storage.footers import FooterCache
from siirl_storage.formats import Footer, Format, damage, footer_of, known_format
from siirl_storage.schemas import check_schema

_BATCH_BYTES = 2**23  # decoded at once, about: in the processor's reach, and many rows of text
_BATCH_ROWS = 2**16
_SMALL = 2**20  # bytes of a row group that one thread decodes sooner than several find their parts
_FEW_ROWS = 64  # at a time take long: 0.2 ms a batch
# of a batch whose texts are stored once, at most, unless that leaves few rows
_REPEATED_BYTES = 2**27
# bytes that are read ahead of a column, on local disk and for each request to an object store
_BUFFER = 2**23
# bytes after a column of a row group, which is read whole; s3fs fetches 50 MiB more by itself
_READ_AHEAD = 2**12
# BYTE_ARRAY: what is stored
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
# bytes of a row in a column that stores nothing of it: an offset, an index into what is selected
_ROW = 8


def read_rows(
    fs: AbstractFileSystem,
    path: str,
    index: int,
    columns: Sequence[str],
    groups: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    max_bytes: int | None = None,
    footers: FooterCache | None = None,
) -> pa.Table:
    """Return rows of row group ``index`` of the part at ``path``, with those of ``columns`` that it
    has, in its types.

    ``rows`` are row numbers in ascending order; None: all. Beside the rows that it returns it holds
    one batch, and the pages that the batch is in: pyarrow's writer makes them of 1,024 values. With
    ``footers`` it reads the part's footer only where they do not hold it.

    CorruptPart if the part is missing or damaged, or if the rows of its groups are not ``groups``;
    TooLarge if the row group or the rows take more than ``max_bytes`` (None: the machine's memory).
    """
    bound = _limit(max_bytes)
    where = f"row group {index} of {full_name(fs, path)}"
    alone = footers is not None  # and not all row groups of the part in turn
    with damage(fs, path), open_input(fs, path, _READ_AHEAD if alone else None) as file:
        kind = known_format(path)
        held = None if footers is None else footers.get(path, file, kind, groups)
        footer = held.footer if held else footer_of(file, kind)
        _check_groups(footer, groups, full_name(fs, path))
        present = [name for name in columns if name in footer.schema.names]
        match kind:
            case Format.PARQUET:
                schema, batches = _parquet_batches(
                    file,
                    held and held.metadata,
                    index=index,
                    columns=present,
                    bound=bound,
                    where=where,
                )
            case Format.ARROW:
                schema, batches = _arrow_batches(file, index, present)
        selected = list(_select(batches, rows, bound, where))
        table = pa.Table.from_batches(selected, schema).select(present)
    expected = groups[index] if rows is None else len(rows)
    if table.num_rows != expected:
        raise CorruptPart(
            full_name(fs, path),
            f"row group {index} gave {table.num_rows} rows instead of {expected}",
        )
    return table


def read_part(fs: AbstractFileSystem, path: str, *, max_bytes: int | None = None) -> pa.Table:
    """Return all rows of the part at ``path``, which is opened and whose footer is read once: for
    small parts.

    CorruptPart if the part is missing or damaged; TooLarge if a row group takes more than
    ``max_bytes`` (None: the machine's memory).
    """
    bound = _limit(max_bytes)
    kind = known_format(path)
    where = full_name(fs, path)
    with damage(fs, path), open_input(fs, path) as file:
        if kind is Format.ARROW:
            stored = pa.ipc.open_file(file)
            schema = stored.schema
            groups = (iter([stored.get_batch(index)]) for index in range(stored.num_record_batches))
        else:
            reader = _parquet_file(file)
            schema = reader.schema_arrow
            groups = (
                _bounded(
                    reader,
                    index,
                    schema=schema,
                    columns=schema.names,
                    bound=bound,
                    where=f"row group {index} of {where}",
                )
                for index in range(reader.metadata.num_row_groups)
            )
        str(schema)  # names are decoded only when they are looked at
        check_schema(schema, where)
        named = ((f"row group {index} of {where}", batches) for index, batches in enumerate(groups))
        selected: list[pa.RecordBatch] = []
        for name, batches in named:
            selected.extend(_select(batches, None, bound, name))
        return pa.Table.from_batches(selected, schema)


def _bounded(
    reader: pq.ParquetFile,
    index: int,
    schema: pa.Schema,
    columns: Sequence[str],
    bound: int,
    where: str,
) -> Iterator[pa.RecordBatch]:
    sizes = _decoded_size(reader.metadata.row_group(index), schema, columns)
    if sizes[0] > bound:
        raise TooLarge(where, sizes[0], bound)
    return _group_batches(reader, index, columns, bound, sizes)


def read_batches(
    fs: AbstractFileSystem,
    path: str,
    columns: Sequence[str],
    groups: Sequence[int],
    *,
    max_bytes: int | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield all rows of the part at ``path``, some megabytes at a time, with those of ``columns``
    that it has.

    A row group of Parquet is decoded batch by batch; one of Arrow, which is a record batch, is read
    as a whole. CorruptPart as in ``read_rows``; TooLarge if one batch takes more than ``max_bytes``
    (None: the machine's memory).
    """
    bound = _limit(max_bytes)
    with damage(fs, path), open_input(fs, path) as file:
        kind = known_format(path)
        footer = footer_of(file, kind)
        _check_groups(footer, groups, full_name(fs, path))
        present = [name for name in columns if name in footer.schema.names]
        reader = _parquet_file(file) if kind is Format.PARQUET else None
        for index, rows in enumerate(groups):
            if reader is not None:
                sizes = _decoded_size(
                    reader.metadata.row_group(index), reader.schema_arrow, present
                )
                most = _machine_memory() // 2
                batches = _group_batches(
                    reader,
                    index,
                    columns=present,
                    bound=min(bound, _REPEATED_BYTES),
                    sizes=sizes,
                    most=most,
                )
            else:
                batches = _arrow_batches(file, index, present)[1]
            seen = 0
            selected = _select(
                batches, None, bound, f"row group {index} of {full_name(fs, path)}", each=True
            )
            for batch in _joined(selected):
                seen += batch.num_rows
                yield batch.select(present)
            if seen != rows:
                raise CorruptPart(
                    full_name(fs, path), f"row group {index} gave {seen} rows instead of {rows}"
                )


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of ``batches`` in batches of some megabytes or more."""
    held: list[pa.RecordBatch] = []
    rows = nbytes = 0
    for batch in batches:
        if held and (nbytes + batch.nbytes > _BATCH_BYTES or rows + batch.num_rows > _BATCH_ROWS):
            yield held[0] if len(held) == 1 else pa.concat_batches(held)
            held = []
            rows = 0
            nbytes = 0
        held.append(batch)
        rows = rows + batch.num_rows
        nbytes = nbytes + batch.nbytes
    if held:
        yield held[0] if len(held) == 1 else pa.concat_batches(held)


def _check_groups(footer: Footer, groups: Sequence[int], where: str) -> None:
    if footer.groups != tuple(groups):
        says = f"{sum(footer.groups)} rows in {len(footer.groups)} row groups"
        expected = f"{sum(groups)} in {len(groups)}"
        raise CorruptPart(where, f"it has {says}, and should have {expected}")


def _select(
    batches: Iterator[pa.RecordBatch],
    rows: Sequence[int] | None,
    bound: int,
    where: str,
    *,
    each: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield copies of the rows in each batch, or whole batches for None; stop after the last row
    that is wanted.

    TooLarge if all take more than ``bound``, or with ``each`` if one does.
    """
    first = 0
    at = 0
    total = 0
    for batch in batches:
        batch.validate(full=True)  # a damaged offset must end here, not in the code that follows it
        if rows is not None:
            end = bisect_left(rows, first + batch.num_rows)
            wanted = [row - first for row in rows[at:end]]
            first = first + batch.num_rows
            at = end
            batch = _taken(batch, wanted) if wanted else batch.slice(0, 0)
        total = batch.nbytes + (0 if each else total)
        if total > bound:
            raise TooLarge(where, total, bound)
        if batch.num_rows:
            yield batch
        if rows is not None and at == len(rows):
            return


def _taken(batch: pa.RecordBatch, rows: Sequence[int]) -> pa.RecordBatch:
    try:
        return batch.take(pa.array(rows, pa.int64()))
    except pa.ArrowNotImplementedError:  # of string_view and binary_view
        return pa.concat_batches([batch.slice(row, 1) for row in rows])


def _parquet_batches(
    file: pa.NativeFile,
    metadata: pq.FileMetaData | None,
    index: int,
    columns: Sequence[str],
    bound: int,
    where: str,
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    reader = _parquet_file(file, metadata)
    whole = reader.schema_arrow  # made anew at each call
    schema = pa.schema([whole.field(name) for name in columns])
    return schema, _bounded(reader, index, schema=whole, columns=columns, bound=bound, where=where)


def _parquet_file(file: pa.NativeFile, metadata: pq.FileMetaData | None = None) -> pq.ParquetFile:
    # Without pre_buffer and with a buffer, a column chunk is read as it is decoded, not as a whole.
    return pq.ParquetFile(
        file,
        metadata=metadata,
        page_checksum_verification=True,
        pre_buffer=False,
        buffer_size=_BUFFER,
    )


def _group_batches(
    reader: pq.ParquetFile,
    index: int,
    columns: Sequence[str],
    bound: int,
    sizes: tuple[int, int],
    most: int = 0,
) -> Iterator[pa.RecordBatch]:
    """Return an iterator over a row group, in batches of some megabytes, which texts stored once
    cannot make larger than ``bound``; or with ``most``, than that, where batches would otherwise
    have very few rows. ``sizes`` are the group's, of ``_decoded_size``.
    """
    size, repeatable = sizes
    mean = max(1, size // max(1, reader.metadata.row_group(index).num_rows))
    row_bytes = max(1, repeatable)
    fitting = max(bound // row_bytes, min(_FEW_ROWS, most // row_bytes))
    rows = min(_BATCH_ROWS, _BATCH_BYTES // mean, fitting)
    batches = reader.iter_batches(
        max(1, rows),
        row_groups=[index],
        columns=list(columns),
        use_threads=size > _SMALL,
    )
    return (batch.select(list(columns)) for batch in batches)  # they come in the file's order


def _decoded_size(
    group: pq.RowGroupMetaData, schema: pa.Schema, columns: Sequence[str]
) -> tuple[int, int]:
    """Return bytes that ``columns`` of a row group take once decoded, as far as its footer tells,
    and bytes that each row may repeat: texts and blobs that are stored once, in a dictionary.
    """
    stored = dict.fromkeys(columns, 0)
    repeatable = 0
    for number in range(group.num_columns):
        chunk = group.column(number)
        name = next(
            (name for name in columns if (chunk.path_in_schema + ".").startswith(name + ".")), None
        )
        if name is not None:
            width = _WIDTHS.get(chunk.physical_type)
            stored[name] += (
                chunk.total_uncompressed_size if width is None else chunk.num_values * width
            )
            if width is None and chunk.has_dictionary_page:
                repeatable += chunk.total_uncompressed_size
    sizes = (
        max(size, group.num_rows * _row_bytes(schema.field(name).type))
        for name, size in stored.items()
    )
    return sum(sizes), repeatable


def _row_bytes(kind: pa.DataType) -> int:
    """Return bytes that a row of the type takes at least."""
    try:
        return max(_ROW, int(kind.bit_width) // 8)
    except ValueError:
        return _ROW


def _arrow_batches(
    file: pa.NativeFile, index: int, columns: Sequence[str]
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    schema = pa.ipc.open_file(file).schema
    wanted = sorted(schema.get_field_index(name) for name in columns)
    if not wanted:
        wanted = [0]  # an empty list would mean every field
    reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=wanted))
    return reader.schema, (reader.get_batch(number) for number in (index,))


def _limit(max_bytes: int | None) -> int:
    """Return a limit in bytes; the machine's memory for None."""
    if max_bytes is None:
        return _machine_memory()
    return max_bytes


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
