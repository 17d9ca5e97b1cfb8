"""Names of files for DuckDB, to which each name is a pattern: ``[1]`` in a folder's name leads
it to other files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from glob import escape
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem


def make_known(connection: Any, fs: AbstractFileSystem) -> None:
    """Let a connection to DuckDB open the files of ``fs``, each by exactly the name that
    ``sql_list`` writes.
    """
    if not isinstance(fs, LocalFileSystem):
        connection.register_filesystem(_ExactNames(fs))


def sql_list(fs: AbstractFileSystem, paths: Sequence[str]) -> str:
    """Return these files as a list in SQL, for ``read_parquet`` and its like; name
    ``hive_partitioning=false`` too.
    """
    if isinstance(fs, LocalFileSystem):
        names = [escape(path) for path in paths]
    else:
        names = [str(fs.unstrip_protocol(path)) for path in paths]
    return _quoted(names)


def _quoted(names: Iterable[str]) -> str:
    """Return names as a list of SQL."""
    quoted = []
    for name in names:
        escaped = name.replace("'", "''")
        quoted.append(f"'{escaped}'")
    return f"[{', '.join(quoted)}]"


def confine(connection: Any, fs: AbstractFileSystem, root: str) -> None:
    """Let a connection to DuckDB reach nothing but what is below ``root`` from now on: no other
    files, no network, no variables of Python, and no statement that changes that.
    """
    folder = root.rstrip("/") + "/"
    if isinstance(fs, LocalFileSystem):
        names = [folder, escape(folder)]
    else:
        protocols = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
        names = [
            str(fs.unstrip_protocol(folder)),
            *(f"{protocol}://{folder}" for protocol in protocols),
        ]
    connection.execute(f"SET allowed_directories = {_quoted(dict.fromkeys(names))}")
    connection.execute("SET python_enable_replacements = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


class _ExactNames(AbstractFileSystem):  # type: ignore[misc]
    """Reads the files of ``fs``; a pattern matches the file of this very name. DuckDB asks that
    of every name.
    """

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

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> Any:
        return self.fs.open(path, mode, block_size=block_size)
