"""Names of files for DuckDB, to which each name is a pattern: ``[1]`` in a folder's name leads it to other files."""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem


def make_known(connection: Any, fs: AbstractFileSystem) -> None:
    """Let a connection to DuckDB open the files of ``fs``, each by exactly the name that ``sql_list`` writes."""
    if not isinstance(fs, LocalFileSystem):
        connection.register_filesystem(_ExactNames(fs))


def sql_list(fs: AbstractFileSystem, paths: Sequence[str]) -> str:
    """Return these files as a list in SQL, for ``read_parquet`` and its like; name ``hive_partitioning=false`` too."""
    if isinstance(fs, LocalFileSystem):
        names = [escape(path) for path in paths]
    else:
        names = [str(fs.unstrip_protocol(path)) for path in paths]
    return "[" + ", ".join("'" + name.replace("'", "''") + "'" for name in names) + "]"


class _ExactNames(AbstractFileSystem):  # type: ignore[misc]
    """Reads the files of ``fs``; a pattern matches the file of this very name. DuckDB asks that of every name."""

    cachable = False

    def __init__(self, fs: AbstractFileSystem) -> None:
        super().__init__()
        self.fs = fs
        self.protocol = fs.protocol
        self._strip_protocol = fs._strip_protocol

    def glob(self, path: str, **kwargs: Any) -> list[str]:
        return [str(self._strip_protocol(path))]

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.fs.info(path, **kwargs)

    def modified(self, path: str) -> Any:
        return self.fs.modified(path)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        return self.fs.open(path, mode, block_size=block_size)
