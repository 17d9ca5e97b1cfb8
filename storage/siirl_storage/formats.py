"""Converts tables to and from the bytes of one part: Parquet, or Arrow IPC, whose record batches
are row groups.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from siirl_storage.errors import CorruptPart, StorageError, clause
from siirl_storage.files import full_name, open_input
from siirl_storage.schemas import check_schema


class Format(StrEnum):
    """File format of a part. The value is the suffix of its file name."""

    PARQUET = "parquet"
    """Parquet with zstd (small parts: snappy) and page checksums: small, and damage is detected."""
    ARROW = "arrow"
    """Uncompressed Arrow IPC: not decoded, can be mapped; flipped bits inside a value are not
    detected."""


ROWS_PER_GROUP = 1024
"""Default rows of a row group, the unit that one worker reads: a few MB for prompts, about 100
MB for long contexts."""

FIRST_BYTES = 256
"""Bytes of a file by which ``stand_in`` tells what it is."""
_LFS = b"version https://git-lfs.github.com/spec/"
_PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html)\b", re.IGNORECASE)
_SMALL = 2**16  # bytes of a table before it is encoded
_ENDINGS = {".parquet": Format.PARQUET, ".arrow": Format.ARROW, ".feather": Format.ARROW}
ENDINGS = ", ".join(_ENDINGS)


@dataclass(frozen=True, slots=True)
class Footer:
    """Metadata that a part holds about itself."""

    schema: pa.Schema
    groups: tuple[int, ...]
    """Number of rows of each row group."""
    digest: str = ""
    """SHA-256 of what the footer says, where ``read_footer`` has read it: of Parquet also sizes
    and statistics."""


def format_of(path: str) -> Format | None:
    """Return the format of a file name's suffix; None if the file is no part."""
    name = path.lower()
    return next((kind for ending, kind in _ENDINGS.items() if name.endswith(ending)), None)


def encode(
    table: pa.Table,
    kind: Format,
    rows_per_group: int,
    bytes_per_group: int | None = None,
) -> pa.Buffer:
    """Return ``table`` as the bytes of one part. StorageError if the format cannot hold a column.

    A row group has at most ``rows_per_group`` rows and, if given, ``bytes_per_group`` bytes before
    they are encoded; a row that is larger than that is a row group by itself.
    """
    if rows_per_group < 1:
        raise ValueError(f"rows_per_group={rows_per_group} must be at least 1")
    check_schema(table.schema, "table to write")
    table = table.combine_chunks()  # chunks must not show in where row groups end
    sink = pa.BufferOutputStream()
    try:
        match kind:
            case Format.PARQUET:
                with pq.ParquetWriter(
                    sink, table.schema, write_page_checksum=True, **_encoding(table)
                ) as writer:
                    for group in _groups(table, rows_per_group, bytes_per_group):
                        writer.write_table(group, row_group_size=rows_per_group)
            case Format.ARROW:
                with pa.ipc.new_file(sink, table.schema) as writer:
                    for group in _groups(table, rows_per_group, bytes_per_group):
                        writer.write_table(group, max_chunksize=rows_per_group)
    except pa.ArrowException as error:
        raise StorageError(f"cannot store this table as {kind}: {error}") from error
    return sink.getvalue()


def _encoding(table: pa.Table) -> dict[str, Any]:
    """Return how the values of each column become bytes: numbers with a fraction get no dictionary,
    and hardly zstd.

    Few of these are equal. A dictionary of log-probs made a part half as large again, took three
    times as long to write and half as long again to read; zstd's usual levels take 10 % off their
    bytes, and again half of the time to read. Small parts get snappy: zstd sets itself up anew for
    each page, which takes three quarters of the time to write or to read the 5 kB of a step's
    trace, for hardly a byte less.
    """
    schema = table.schema
    fractions = []
    others = []
    for field in schema:
        for path, kind in _leaves(field):
            if pa.types.is_floating(kind):
                fractions.append(path)
            else:
                others.append(path)
    if table.nbytes < _SMALL:
        return {"compression": "snappy", "use_dictionary": others}
    return {
        "compression": "zstd",
        "compression_level": dict.fromkeys(fractions, -1),
        "use_dictionary": others,
    }


def _leaves(field: pa.Field, above: str = "") -> Iterator[tuple[str, pa.DataType]]:
    """Yield path and type of each column of numbers or bytes that Parquet makes of a field."""
    path = f"{above}{field.name}"
    kind = field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if pa.types.is_map(kind):
        yield from _leaves(kind.key_field.with_name("key"), f"{path}.key_value.")
        yield from _leaves(kind.item_field.with_name("value"), f"{path}.key_value.")
    elif pa.types.is_struct(kind):
        for one in kind:
            yield from _leaves(one, f"{path}.")
    elif hasattr(kind, "value_field"):
        yield from _leaves(kind.value_field.with_name("element"), f"{path}.list.")
    else:
        yield path, kind


def _groups(table: pa.Table, rows: int, nbytes: int | None) -> Iterator[pa.Table]:
    """Yield the table's rows in tables that do not exceed ``nbytes``, or the table as it is for
    None.
    """
    if nbytes is None:
        yield table
        return
    start = 0
    while start < table.num_rows:
        most = min(rows, table.num_rows - start)
        lengths = range(1, most + 1)
        fitting = bisect_right(
            lengths, nbytes, key=lambda length: int(table.slice(start, length).nbytes)
        )
        yield table.slice(start, max(1, fitting))
        start += max(1, fitting)


def decode_footer(buffer: pa.Buffer, kind: Format) -> Footer:
    """Return the footer of a part that ``encode`` has just made."""
    return footer_of(pa.BufferReader(buffer), kind)


def read_footer(fs: AbstractFileSystem, path: str) -> Footer:
    """Return schema and row groups of the part at ``path``, without data. CorruptPart if it is
    missing or damaged.
    """
    with damage(fs, path), open_input(fs, path) as file:
        match known_format(path):
            case Format.PARQUET:
                parquet = pq.ParquetFile(file)
                footer = parquet_footer(parquet)
                stored = pa.BufferOutputStream()
                parquet.metadata.write_metadata_file(stored)
                digest = sha256(stored.getvalue())
            case Format.ARROW:
                footer = footer_of(file, Format.ARROW)
                digest = sha256(footer.schema.serialize())
                digest.update(repr(footer.groups).encode())
        str(footer.schema)  # names are decoded only when they are looked at
    check_schema(footer.schema, full_name(fs, path))
    return replace(footer, digest=digest.hexdigest())


def known_format(path: str) -> Format:
    kind = format_of(path)
    if kind is None:
        raise StorageError(f"{path} is not a part: its name does not end in {ENDINGS}")
    return kind


def footer_of(file: pa.NativeFile, kind: Format) -> Footer:
    match kind:
        case Format.PARQUET:
            return parquet_footer(pq.ParquetFile(file))
        case Format.ARROW:
            schema = pa.ipc.open_file(file).schema
            if not schema.names:
                return Footer(schema, ())
            # Arrow tells a batch's rows only with a column of it: read the one that is likely the
            # smallest.
            narrow = next(
                (i for i, field in enumerate(schema) if pa.types.is_primitive(field.type)), 0
            )
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=[narrow]))
            return Footer(
                schema,
                tuple(reader.get_batch(i).num_rows for i in range(reader.num_record_batches)),
            )


def parquet_footer(file: pq.ParquetFile) -> Footer:
    """Return schema and row groups of a Parquet file that is open."""
    metadata = file.metadata
    rows = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
    return Footer(file.schema_arrow, tuple(rows))


def stand_in(first: bytes) -> str | None:
    """Return in words what was left in the place of a file that begins with these bytes, and what to
    do; None for one that may be what its name says.
    """
    if first.startswith(_LFS):
        return (
            "it is a pointer of Git LFS in the place of the file: `git lfs pull` in its repository "
            "fetches that"
        )
    if _PAGE.match(first):
        return (
            "it is a web page in the place of the file, as servers send where a file is not there or "
            "needs a login: fetch the file itself"
        )
    return None


@contextmanager
def damage(fs: AbstractFileSystem, path: str) -> Iterator[None]:
    """Convert Arrow's errors on bad bytes to CorruptPart; errors of the store itself pass
    through.
    """
    try:
        yield
    except pa.ArrowMemoryError as error:
        raise CorruptPart(
            full_name(fs, path), f"{clause(error)}: it is damaged, or too large for this machine"
        ) from error
    except FileNotFoundError as error:
        raise CorruptPart(full_name(fs, path), "it is not there") from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise CorruptPart(full_name(fs, path), _reason(fs, path, error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        # Arrow's own: bad Thrift, page checksum
        raise CorruptPart(full_name(fs, path), _reason(fs, path, error)) from error


def _reason(fs: AbstractFileSystem, path: str, error: Exception) -> str:
    """Return why bytes are no part: what stands in its place, or Arrow's own words."""
    try:
        with open_input(fs, path) as file:
            other = stand_in(file.read(FIRST_BYTES))
    except Exception:  # a store that fails just now: what it has read is told
        other = None
    if other is not None:
        return other
    return str(error)
