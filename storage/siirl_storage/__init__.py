"""Partitioned Arrow tables on any fsspec URL: a local path, ``s3://``, ``gs://``, ``memory://``,
...

A table is a folder of Parquet or Arrow parts; a snapshot's manifest is written last and created
exclusively, so a reader sees a whole version or none. Plain files that somebody else wrote open as
tables too. See docs/storage.md.
"""

from siirl_storage.committed import (
    PartsRecord,
    commit_parts,
    complete_parts,
    read_record,
    stage_part,
)
from siirl_storage.errors import Conflict, CorruptPart, StorageError, TableNotFound, TooLarge
from siirl_storage.files import (
    join,
    open_fs,
    remove_file,
    remove_tree,
    write_atomic,
    write_exclusive,
)
from siirl_storage.footers import FooterCache
from siirl_storage.formats import ROWS_PER_GROUP, Format
from siirl_storage.parts import Part, parse_part_name, part_name, write_part
from siirl_storage.retry import (
    RETRY_SECONDS,
    is_transient,
    retries_end_at,
    retry,
    retry_seconds,
    set_retry_seconds,
)
from siirl_storage.snapshot import RowGroup, Snapshot
from siirl_storage.table import ROWS_PER_PART, append, commit, create_table, open_table, stage

__all__ = [
    "RETRY_SECONDS",
    "ROWS_PER_GROUP",
    "ROWS_PER_PART",
    "Conflict",
    "CorruptPart",
    "FooterCache",
    "Format",
    "Part",
    "PartsRecord",
    "RowGroup",
    "Snapshot",
    "StorageError",
    "TableNotFound",
    "TooLarge",
    "append",
    "commit",
    "commit_parts",
    "complete_parts",
    "create_table",
    "is_transient",
    "join",
    "open_fs",
    "open_table",
    "parse_part_name",
    "part_name",
    "read_record",
    "remove_file",
    "remove_tree",
    "retries_end_at",
    "retry",
    "retry_seconds",
    "set_retry_seconds",
    "stage",
    "stage_part",
    "write_atomic",
    "write_exclusive",
    "write_part",
]
