"""A filesystem that counts what is read: ``counting://`` before another one's path, for tests and
benchmarks.

    reads = count_reads()
    open_table("counting:///tmp/rows")
    reads.bytes_of("/tmp/rows")

It reads as an object store's client does: in ranges, each with what the client reads ahead.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.config import conf
from fsspec.spec import AbstractBufferedFile

_PROTOCOL = "counting"


@dataclass(slots=True)
class Reads:
    """Reads of this process through ``counting://``, by path."""

    nbytes: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)

    def bytes_of(self, folder: str) -> int:
        """Return the bytes read of all files below ``folder``."""
        return sum(count for path, count in self.nbytes.items() if path.startswith(folder))

    def clear(self) -> None:
        """Begin to count anew."""
        self.nbytes.clear()
        self.requests.clear()


def count_reads(target: str = "file", **options: Any) -> Reads:
    """Make ``counting://`` known in this process, with the filesystem ``target`` below it, and
    return its counts.
    """
    reads = Reads()
    fsspec.register_implementation(_PROTOCOL, CountingFileSystem, clobber=True)
    conf[_PROTOCOL] = {"reads": reads, "target": target, "options": options}
    return reads


class CountingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Reads from ``target``, and counts."""

    protocol = _PROTOCOL
    cachable = False
    default_block_size = 50 * 2**20
    """Bytes that are read ahead unless the opener says how many: those of s3fs."""

    def __init__(
        self,
        reads: Reads,
        target: str = "file",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.reads = reads
        self.fs = fsspec.filesystem(target, **(options or {}))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.fs.info(self._strip_protocol(path), **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self.fs.ls(self._strip_protocol(path), detail=detail, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self.fs.find(self._strip_protocol(path), *args, **kwargs)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> Any:
        path = self._strip_protocol(path)
        data = self.fs.cat_file(path, start=start, end=end)
        self.reads.nbytes[path] += len(data)
        self.reads.requests[path] += 1
        return data

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> AbstractBufferedFile:
        return _CountingFile(self, path, mode, block_size or self.default_block_size, **kwargs)


class _CountingFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> Any:
        return self.fs.cat_file(self.path, start=start, end=end)
