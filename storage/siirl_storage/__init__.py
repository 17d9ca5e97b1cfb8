"""Partitioned Arrow tables on any fsspec URL: a local path, ``s3://``, ``gs://``, ``memory://``,
...

A table is a folder of Parquet or Arrow parts; a snapshot's manifest is written last and created
exclusively, so a reader sees a whole version or none. Plain files that somebody else wrote open as
tables too. See docs/storage.md.
"""

from siirl_storage.committed import (
    PartsRecord,
    by_folder,
    commit_parts,
    complete_parts,
    newest_parts,
    newest_record,
    read_record,
    stage_part,
)
from siirl_storage.digests import FileDigest, digest_file
from siirl_storage.errors import (
    Conflict,
    CorruptPart,
    PartsDiffer,
    StorageError,
    TableNotFound,
    TooLarge,
)
from siirl_storage.files import (
    absolute,
    full_disk_named,
    full_name,
    is_full,
    join,
    list_files,
    open_fs,
    open_input,
    remove_file,
    remove_tree,
    write_atomic,
    write_exclusive,
)
from siirl_storage.footers import FooterCache
from siirl_storage.formats import ROWS_PER_GROUP, Format, read_footer
from siirl_storage.manifest import is_below, parse_part, part_entry
from siirl_storage.parts import Part, parse_part_name, part_name, write_part
from siirl_storage.reading import read_rows
from siirl_storage.retry import (
    RETRY_SECONDS,
    is_of_store,
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
    "FileDigest",
    "FooterCache",
    "Format",
    "Part",
    "PartsDiffer",
    "PartsRecord",
    "RowGroup",
    "Snapshot",
    "StorageError",
    "TableNotFound",
    "TooLarge",
    "absolute",
    "append",
    "by_folder",
    "commit",
    "commit_parts",
    "complete_parts",
    "create_table",
    "digest_file",
    "full_disk_named",
    "full_name",
    "is_below",
    "is_full",
    "is_of_store",
    "is_transient",
    "join",
    "list_files",
    "newest_parts",
    "newest_record",
    "open_fs",
    "open_input",
    "open_table",
    "parse_part",
    "parse_part_name",
    "part_entry",
    "part_name",
    "read_footer",
    "read_record",
    "read_rows",
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
