"""Parts that independent workers write side by side: ``step=000007/part-00002-of-00004.parquet``.

Nobody commits: a part appears whole, its name says how many there will be, and the folder is
complete when all are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from siirl_storage.digests import FileDigest
from siirl_storage.files import at, open_fs, write_atomic
from siirl_storage.formats import ROWS_PER_GROUP, Format, decode_footer, encode

_NAME = re.compile(r"part-(\d{5,})-of-(\d{5,})\.(parquet|arrow)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Part:
    """One data file of a table."""

    path: str
    """Path relative to the table's URL."""
    nbytes: int
    """Size of the file in bytes."""
    groups: tuple[int, ...]
    """Number of rows of each row group."""
    sha256: str | None = None
    """SHA-256 of the file in hexadecimal; None where an earlier version wrote the part."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))  # a list, if it travelled as JSON

    @property
    def rows(self) -> int:
        return sum(self.groups)


def part_name(index: int, count: int, format: Format = Format.PARQUET) -> str:
    """Return ``part-00002-of-00004.parquet``. ValueError unless 0 <= index < count."""
    if not 0 <= index < count:
        raise ValueError(f"part index {index} is not in 0..{count - 1}")
    return f"part-{index:05d}-of-{count:05d}.{format}"


def parse_part_name(name: str) -> tuple[int, int, Format] | None:
    """Return (index, count, format) of a name that ``part_name`` made; None for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    index = int(match[1])
    count = int(match[2])
    kind = Format(match[3])
    if index >= count or part_name(index, count, kind) != name:
        return None
    return index, count, kind


def write_part(
    url: str,
    index: int,
    count: int,
    table: pa.Table,
    *,
    format: Format = Format.PARQUET,
    rows_per_group: int = ROWS_PER_GROUP,
) -> Part:
    """Write part ``index`` of ``count`` into the folder ``url``, whole or not at all, or replace
    it.

    StorageError if the format cannot hold a column.
    """
    return put_part(url, part_name(index, count, format), table, format, rows_per_group)


def put_part(
    url: str,
    path: str,
    table: pa.Table,
    format: Format,
    rows_per_group: int,
    bytes_per_group: int | None = None,
) -> Part:
    """Write ``table`` as one part at ``path`` below ``url``, atomically."""
    buffer = encode(table, format, rows_per_group, bytes_per_group)
    fs, root = open_fs(url)
    write_atomic(fs, at(root, path), memoryview(buffer))
    return Part(
        path,
        buffer.size,
        decode_footer(buffer, format).groups,
        FileDigest.of(memoryview(buffer)).sha256,
    )


def complete_names(names: Iterable[str]) -> list[str] | None:
    """Return the parts among ``names`` in order, if all that they announce are there; None if some
    are missing.

    Also None if two of them disagree on how many there are, or are the same part in two formats: a
    restart on another number of workers must empty the folder first.
    """
    parts = {name: parsed for name in names if (parsed := parse_part_name(name))}
    found = sorted(parts, key=lambda name: parts[name][0])
    expected = [(index, len(found)) for index in range(len(found))]
    numbers = [parts[name][:2] for name in found]
    if found and numbers == expected:
        return found
    return None
