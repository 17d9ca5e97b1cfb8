"""Converts tables to and from the bytes of one part: Parquet, or Arrow IPC, whose record batches are row groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from siirl_storage.errors import CorruptPart, StorageError
from siirl_storage.files import full_name, open_input
from siirl_storage.schemas import check_schema


class Format(StrEnum):
    """File format of a part. The value is the suffix of its file name."""

    PARQUET = "parquet"
    """Parquet with zstd and page checksums: small, and damage is detected."""
    ARROW = "arrow"
    """Uncompressed Arrow IPC: not decoded, can be mapped; flipped bits inside a value are not detected."""


ROWS_PER_GROUP = 1024
"""Default rows of a row group, the unit that one worker reads: a few MB for prompts, about 100 MB for long contexts."""

_ENDINGS = {".parquet": Format.PARQUET, ".arrow": Format.ARROW, ".feather": Format.ARROW}
ENDINGS = ", ".join(_ENDINGS)


@dataclass(frozen=True, slots=True)
class Footer:
    """Metadata that a part holds about itself."""

    schema: pa.Schema
    groups: tuple[int, ...]
    """Number of rows of each row group."""


def format_of(path: str) -> Format | None:
    """Return the format of a file name's suffix; None if the file is no part."""
    return next((kind for ending, kind in _ENDINGS.items() if path.endswith(ending)), None)


def encode(table: pa.Table, kind: Format, rows_per_group: int) -> pa.Buffer:
    """Return ``table`` as the bytes of one part. StorageError if the format cannot hold a column."""
    if rows_per_group < 1:
        raise ValueError(f"rows_per_group={rows_per_group} must be at least 1")
    check_schema(table.schema, "table to write")
    table = table.combine_chunks()  # chunks must not show in where row groups end
    sink = pa.BufferOutputStream()
    try:
        match kind:
            case Format.PARQUET:
                pq.write_table(table, sink, row_group_size=rows_per_group, compression="zstd", write_page_checksum=True)
            case Format.ARROW:
                with pa.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(table, max_chunksize=rows_per_group)
    except pa.ArrowException as error:
        raise StorageError(f"cannot store this table as {kind}: {error}") from error
    return sink.getvalue()


def decode_footer(buffer: pa.Buffer, kind: Format) -> Footer:
    """Return the footer of a part that ``encode`` has just made."""
    return _footer(pa.BufferReader(buffer), kind)


def read_footer(fs: AbstractFileSystem, path: str) -> Footer:
    """Return schema and row groups of the part at ``path``, without data. CorruptPart if it is missing or damaged."""
    with _damage(fs, path), open_input(fs, path) as file:
        footer = _footer(file, _known(path))
        str(footer.schema)  # names are decoded only when they are looked at
    check_schema(footer.schema, full_name(fs, path))
    return footer


def read_groups(
    fs: AbstractFileSystem, path: str, indices: Sequence[int], columns: Sequence[str], groups: Sequence[int]
) -> pa.Table:
    """Return the row groups ``indices`` of the part at ``path``, with those of ``columns`` that it has, in its types.

    CorruptPart if it is missing or damaged, or if the rows of its groups are not ``groups``.
    """
    with _damage(fs, path), open_input(fs, path) as file:
        footer = _footer(file, _known(path))
        if footer.groups != tuple(groups):
            says = f"{sum(footer.groups)} rows in {len(footer.groups)} row groups"
            expected = f"{sum(groups)} in {len(groups)}"
            raise CorruptPart(full_name(fs, path), f"it has {says}, and should have {expected}")
        present = [name for name in columns if name in footer.schema.names]
        match _known(path):
            case Format.PARQUET:
                reader = pq.ParquetFile(file, page_checksum_verification=True)
                table = reader.read_row_groups(list(indices), columns=present)
            case Format.ARROW:
                table = _read_batches(file, indices, present)
        table.validate(full=True)  # a damaged offset must end here, not in the code that follows it
        return table.select(present)


def _known(path: str) -> Format:
    kind = format_of(path)
    if kind is None:
        raise StorageError(f"{path} is not a part: its name does not end in {ENDINGS}")
    return kind


def _footer(file: pa.NativeFile, kind: Format) -> Footer:
    match kind:
        case Format.PARQUET:
            parquet = pq.ParquetFile(file)
            metadata = parquet.metadata
            rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
            return Footer(parquet.schema_arrow, tuple(rows))
        case Format.ARROW:
            schema = pa.ipc.open_file(file).schema
            if not schema.names:
                return Footer(schema, ())
            # Arrow tells a batch's rows only with a column of it: read the one that is likely the smallest.
            narrow = next((i for i, field in enumerate(schema) if pa.types.is_primitive(field.type)), 0)
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[narrow]))
            return Footer(schema, tuple(reader.get_batch(i).num_rows for i in range(reader.num_record_batches)))


def _read_batches(file: pa.NativeFile, indices: Sequence[int], columns: Sequence[str]) -> pa.Table:
    schema = pa.ipc.open_file(file).schema
    # An empty list would mean every field
    wanted = sorted(schema.get_field_index(name) for name in columns) or [0]
    reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=wanted))
    return pa.Table.from_batches([reader.get_batch(index) for index in indices], reader.schema)


@contextmanager
def _damage(fs: AbstractFileSystem, path: str) -> Iterator[None]:
    """Convert Arrow's errors on bad bytes to CorruptPart; errors of the store itself pass through."""
    try:
        yield
    except pa.ArrowMemoryError as error:
        raise CorruptPart(full_name(fs, path), f"{error}: it is damaged, or too large for this machine") from error
    except FileNotFoundError as error:
        raise CorruptPart(full_name(fs, path), "it is not there") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise CorruptPart(full_name(fs, path), str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise CorruptPart(full_name(fs, path), str(error)) from error  # Arrow's own: bad Thrift, page checksum
