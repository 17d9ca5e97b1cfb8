"""Holds the footers of parts whose row groups are read one after the other.

A footer lists all row groups of its part: megabytes for ten thousand of them, which would be read
and parsed again for each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from siirl_storage.formats import Footer, Format, footer_of, parquet_footer

_MAX_BYTES = 2**23  # as stored; decoded they take about six times that
_GROUP = 8  # bytes of a row group's number of rows


@dataclass(frozen=True, slots=True)
class HeldFooter:
    """A part's footer."""

    footer: Footer
    metadata: pq.FileMetaData | None
    """Parquet's own form, with which a file is read without its footer; None for Arrow."""
    file_bytes: int
    """Size of the file that it was read from."""

    @property
    def nbytes(self) -> int:
        """Bytes that count against the limit."""
        stored = 0
        if self.metadata is not None:
            stored = self.metadata.serialized_size
        return int(stored) + _GROUP * len(self.footer.groups)


@dataclass(slots=True)
class FooterCache:
    """Footers that were read lately, up to ``max_bytes`` and at least one. Belongs to one thread
    and one table.
    """

    max_bytes: int = _MAX_BYTES
    _held: OrderedDict[str, HeldFooter] = field(default_factory=OrderedDict)
    _nbytes: int = 0

    def get(
        self,
        path: str,
        file: pa.NativeFile,
        kind: Format,
        groups: Sequence[int],
    ) -> HeldFooter:
        """Return the footer of the part that is open as ``file``, read now if it is not held for a
        file of this size.

        An Arrow file tells only the number of its row groups without reading a column of each: if
        that is right, their rows are taken to be ``groups``. Raises Arrow's own errors for a
        damaged footer.
        """
        size = int(file.size())
        held = self._held.pop(path, None)
        self._nbytes -= held.nbytes if held else 0
        if held is None or held.file_bytes != size:
            held = _read(file, kind, size, groups)
        self._held[path] = held
        self._nbytes += held.nbytes
        while self._nbytes > self.max_bytes and len(self._held) > 1:
            _, dropped = self._held.popitem(last=False)
            self._nbytes -= dropped.nbytes
        return held


def _read(file: pa.NativeFile, kind: Format, size: int, groups: Sequence[int]) -> HeldFooter:
    if kind is Format.PARQUET:
        parquet = pq.ParquetFile(file)
        return HeldFooter(parquet_footer(parquet), parquet.metadata, size)
    arrow = pa.ipc.open_file(file)
    if arrow.num_record_batches == len(groups):
        return HeldFooter(Footer(arrow.schema, tuple(groups)), None, size)
    return HeldFooter(footer_of(file, kind), None, size)
