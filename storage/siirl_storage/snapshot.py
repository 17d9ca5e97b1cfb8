"""One version of a table, for reading. It holds no open file: any process opens it by ``url``
and ``version``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.fs as pafs
from fsspec import AbstractFileSystem

from siirl_storage import hive
from siirl_storage.errors import CorruptPart, StorageError, TooLarge
from siirl_storage.files import at, full_name, join, open_fs, open_input
from siirl_storage.footers import FooterCache
from siirl_storage.formats import Format, format_of
from siirl_storage.parts import Part
from siirl_storage.reading import read_batches, read_rows
from siirl_storage.schemas import difference, with_fields

if TYPE_CHECKING:
    import pyarrow.dataset as ds


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The smallest unit of a table that can be read by itself."""

    part: str
    """Path of its part, relative to the table."""
    index: int
    """Index of the row group in that part."""
    rows: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One immutable version of a table, or the files of a plain folder as they were when it was
    opened.
    """

    url: str
    """URL at which ``open_table`` finds the table again; a local path is absolute."""
    version: int | None
    """Number of the version; None for plain files."""
    schema: pa.Schema
    parts: tuple[Part, ...]
    properties: Mapping[str, str] = field(default_factory=dict)
    base: str = ""
    """Folder that part paths are relative to: ``url``, or the folder of the one file that
    ``url`` names."""
    digest: str = field(default="", compare=False)
    """SHA-256 of what its manifest, or the footers of plain files, say: another one is another
    table, or was changed. Values that change in place, with the same sizes and statistics, are not
    noticed: no data is read for it."""

    @property
    def num_rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def urls(self) -> list[str]:
        """URLs of the parts, for DuckDB, pandas and other readers."""
        return [join(self.base, part.path) for part in self.parts]

    def row_groups(self) -> tuple[RowGroup, ...]:
        """Return every row group that has rows, in table order."""
        groups = []
        for part in self.parts:
            for index, rows in enumerate(part.groups):
                if rows:
                    groups.append(RowGroup(part.path, index, rows))
        return tuple(groups)

    def read_row_group(
        self,
        group: RowGroup,
        columns: Sequence[str] | None = None,
        *,
        rows: Sequence[int] | None = None,
        max_bytes: int | None = None,
        footers: FooterCache | None = None,
    ) -> pa.Table:
        """Read ``group`` with all columns, or those named, and nothing else of the part.

        ``rows`` are the numbers of the rows to return, in ascending order; None: all. Others are
        decoded on the way, a batch at a time, and are not kept. ``footers`` spares a reader of many
        row groups their part's footer.

        CorruptPart if the part is missing, damaged, or not what the snapshot says; TooLarge if the
        row group takes more than ``max_bytes`` (None: the machine's memory); StorageError for a
        column, a group or a row that there is not.
        """
        part = next((part for part in self.parts if part.path == group.part), None)
        if part is None or not 0 <= group.index < len(part.groups):
            raise StorageError(
                f"{self.url} has no row group {group.index} in a part {group.part!r}"
            )
        count = part.groups[group.index]
        if rows is not None and not _ascending(rows, count):
            raise StorageError(
                f"rows {list(rows)[:8]} of {count} in {group.part!r}: expected ascending row "
                "numbers"
            )
        return self._read(
            part,
            group.index,
            self._projection(columns),
            rows=rows,
            max_bytes=max_bytes,
            footers=footers,
        )

    def to_table(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | None = None
    ) -> pa.Table:
        """Read the whole table into memory. Errors as in ``read_row_group``."""
        schema = self._projection(columns)
        tables = []
        total = 0
        for part in self.parts:
            for index in (index for index, rows in enumerate(part.groups) if rows):
                tables.append(self._read(part, index, schema, None, max_bytes))
                total += tables[-1].nbytes
                if max_bytes is not None and total > max_bytes:
                    raise TooLarge(self.url, total, max_bytes)
        if tables:
            return pa.concat_tables(tables)
        return schema.empty_table()

    def batches(
        self, columns: Sequence[str] | None = None, *, max_bytes: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield all rows in table order, a batch of some megabytes at a time, of whatever size the
        row groups are.

        TooLarge for a batch of more than ``max_bytes`` (None: the machine's memory); else errors as
        in ``read_row_group``.
        """
        schema = self._projection(columns)
        fs, root = open_fs(self.base)
        for part in self.parts:
            path = at(root, part.path)
            for batch in read_batches(fs, path, schema.names, part.groups, max_bytes=max_bytes):
                table = self._with_folder_columns(
                    pa.Table.from_batches([batch]), part, schema, batch.num_rows
                )
                yield from _as_promised(table, schema, fs, path).to_batches()

    def dataset(self) -> ds.Dataset:
        """Return the parts as one Arrow dataset, read as it is scanned. Damage then raises
        Arrow's own errors.
        """
        import pyarrow.dataset as ds  # imports pandas, where that is installed

        fs, root = open_fs(self.base)
        bridge = pafs.PyFileSystem(_ExactHandler(fs))
        fragments = [self._fragment(part, at(root, part.path), bridge) for part in self.parts]
        return ds.FileSystemDataset(fragments, self.schema, _file_format(Format.PARQUET), bridge)

    def _fragment(self, part: Part, path: str, filesystem: pafs.FileSystem) -> ds.Fragment:
        import pyarrow.dataset as ds

        holds = ds.scalar(True)
        for name, value in hive.values(part.path).items():
            if name in self.schema.names:
                column = ds.field(name)
                constant = hive.scalar(value, self.schema.field(name).type)
                holds = holds & (column.is_null() if value is None else column == constant)
        return _file_format(format_of(path)).make_fragment(path, filesystem, holds)

    def _projection(self, columns: Sequence[str] | None) -> pa.Schema:
        if columns is None:
            return self.schema
        unknown = [name for name in columns if name not in self.schema.names]
        if unknown or not columns:
            raise StorageError(
                f"{self.url} has no columns {unknown} to read (it has: "
                f"{', '.join(self.schema.names)})"
            )
        return pa.schema([self.schema.field(name) for name in columns], self.schema.metadata)

    def _read(
        self,
        part: Part,
        index: int,
        schema: pa.Schema,
        rows: Sequence[int] | None,
        max_bytes: int | None,
        footers: FooterCache | None = None,
    ) -> pa.Table:
        fs, root = open_fs(self.base)
        path = at(root, part.path)
        table = read_rows(
            fs,
            path,
            index,
            schema.names,
            part.groups,
            rows=rows,
            max_bytes=max_bytes,
            footers=footers,
        )
        count = part.groups[index] if rows is None else len(rows)
        return _as_promised(self._with_folder_columns(table, part, schema, count), schema, fs, path)

    def _with_folder_columns(
        self,
        table: pa.Table,
        part: Part,
        schema: pa.Schema,
        count: int,
    ) -> pa.Table:
        """Return ``table``, of ``count`` rows of ``part``, with the columns that only its
        folders' names have.
        """
        for name, value in hive.values(part.path).items():
            if name in schema.names and name not in table.column_names:
                constant = hive.scalar(value, schema.field(name).type)
                table = table.append_column(name, pa.repeat(constant, count))
        return table


def _ascending(rows: Sequence[int], count: int) -> bool:
    bounded = [-1, *rows, count]
    return all(before < after for before, after in pairwise(bounded))


def _as_promised(table: pa.Table, schema: pa.Schema, fs: AbstractFileSystem, path: str) -> pa.Table:
    """Return ``table`` in the snapshot's schema; CorruptPart if the file differs from it."""
    differs = difference(schema, table.schema)
    if differs:
        raise CorruptPart(full_name(fs, path), f"it {differs}")
    try:
        return with_fields(table, schema)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptPart(full_name(fs, path), str(error)) from error


def _file_format(kind: Format | None) -> ds.FileFormat:
    import pyarrow.dataset as ds

    if kind is Format.ARROW:
        return ds.IpcFileFormat()
    return ds.ParquetFileFormat(
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    )


class _ExactHandler(pafs.FSSpecHandler):  # type: ignore[misc]
    """Arrow handler of an fsspec filesystem that opens files as the rest of this package does."""

    def open_input_file(self, path: str) -> pa.NativeFile:
        return open_input(self.fs, path)
