"""Writes a stream of rows as a table of siirl_storage, in parts and row groups of bounded size,
with one commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType

import pyarrow as pa
from siirl_storage import (
    ROWS_PER_PART,
    Part,
    Snapshot,
    commit,
    is_full,
    join,
    open_fs,
    remove_file,
    stage,
)

_PART_BYTES = 2**26  # of rows before they are encoded, about
_AHEAD = 1  # parts that wait to be encoded, or are, while the next is read


class TableWriter:
    """Stages parts as rows come in; ``commit`` publishes them. Leaving the block before that
    removes what was staged.

    Rows of two or three parts are in memory. No reader sees a table before ``commit`` returns.
    """

    def __init__(self, url: str, schema: pa.Schema, row_group_bytes: int) -> None:
        self._url = url
        self._schema = schema
        self._row_group_bytes = row_group_bytes
        self._part_bytes = max(_PART_BYTES, row_group_bytes)
        self._tables: list[pa.Table] = []
        self._rows = self._bytes = 0
        self._pool = ThreadPoolExecutor(1, "siirl-import")
        self._pending: deque[Future[Part]] = deque()
        self._parts: list[Part] = []
        self._committing = False

    def __enter__(self) -> TableWriter:
        return self

    def write(self, table: pa.Table) -> None:
        """Take more rows, in the schema; waits while enough of them are on their way."""
        while table.num_rows:
            head = table.slice(0, ROWS_PER_PART - self._rows)
            table = table.slice(head.num_rows)
            self._tables.append(head)
            self._rows += head.num_rows
            self._bytes += int(head.nbytes)
            if self._rows == ROWS_PER_PART or self._bytes >= self._part_bytes:
                self._stage()

    def commit(self, properties: Mapping[str, str], *, append: bool = False) -> Snapshot:
        """Publish all rows as a new table, or with ``append`` as the next version of the table that
        is there.

        Conflict if there is a table and ``append`` is false; StorageError if it has another schema.
        """
        if self._rows:
            self._stage()
        while self._pending:
            self._parts.append(self._pending.popleft().result())
        # from here on a manifest may list the parts, also where its reply is lost
        self._committing = True
        return commit(
            self._url,
            self._parts,
            schema=self._schema,
            properties=properties,
            new=not append,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        if kind is None or (self._committing and not _is_of_full_disk(error)):
            return
        staged = [
            future.result()
            for future in self._pending
            if not future.cancelled() and not future.exception()
        ]
        fs, _ = open_fs(self._url)
        for part in [*self._parts, *staged]:
            # what stays is in no manifest; the error that led here is the one to tell
            with suppress(Exception):
                remove_file(fs, open_fs(join(self._url, part.path))[1])

    def _stage(self) -> None:
        table = pa.concat_tables(self._tables)
        self._tables = []
        self._rows = 0
        self._bytes = 0
        while len(self._pending) >= _AHEAD:
            self._parts.append(self._pending.popleft().result())
        self._pending.append(
            self._pool.submit(stage, self._url, table, bytes_per_group=self._row_group_bytes)
        )


def _is_of_full_disk(error: BaseException | None) -> bool:
    """Tell whether a local disk was full: no manifest was written then, as it may be where a
    store's reply is lost.
    """
    if error is None:
        return False
    if is_full(error):
        return True
    return is_full(error.__cause__)
