"""Tables with snapshots: parts are staged under ``data/``, then one manifest, created
exclusively, publishes them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import chain
from uuid import uuid4

import pyarrow as pa
from fsspec import AbstractFileSystem

from siirl_storage.errors import Conflict, CorruptPart, StorageError, TableNotFound
from siirl_storage.files import absolute, at, full_name, open_fs, write_exclusive
from siirl_storage.formats import ROWS_PER_GROUP, Format, decode_footer, encode
from siirl_storage.manifest import Manifest, is_below, list_versions, manifest_path, read_manifest
from siirl_storage.parts import Part, put_part
from siirl_storage.plain import DATA, open_plain, read_footers
from siirl_storage.schemas import check_schema, conform, difference
from siirl_storage.snapshot import Snapshot

ROWS_PER_PART = 64 * ROWS_PER_GROUP
"""Default rows of a part; one part at a time is held in memory while writing."""
_ATTEMPTS = 64  # of a commit; each that fails means that another writer's succeeded


def open_table(url: str, version: int | None = None) -> Snapshot:
    """Return the newest snapshot of the table at ``url``, or version ``version``; or plain files as
    a table.

    A table with versions costs a listing and one small file, and its parts are checked as they are
    read. A plain ``.parquet``, ``.arrow`` or ``.feather`` file, or a folder of them, costs reading
    every footer (see ``open_plain``).

    TableNotFound if there is none; CorruptPart or StorageError if it cannot be used.
    """
    url = absolute(url)
    fs, root = open_fs(url)
    versions = list_versions(fs, root) if version is None else [version]
    if not versions:
        return open_plain(url)
    try:
        return _snapshot(url, read_manifest(fs, root, versions[-1]))
    except (FileNotFoundError, NotADirectoryError) as error:
        present = ", ".join(map(str, list_versions(fs, root)))
        if not present:
            present = "none"
        raise TableNotFound(
            f"no snapshot {version} of {full_name(fs, root)} (versions there: {present})"
        ) from error


def create_table(
    url: str,
    tables: Iterable[pa.Table],
    *,
    schema: pa.Schema | None = None,
    format: Format = Format.PARQUET,
    rows_per_part: int = ROWS_PER_PART,
    rows_per_group: int = ROWS_PER_GROUP,
    properties: Mapping[str, str] | None = None,
) -> Snapshot:
    """Write ``tables``, in order, as version 1 of a new table. ``schema`` defaults to that of the
    first.

    Conflict if there is a table, or another process creates it meanwhile; StorageError if a table
    does not fit the schema, or if there is neither a schema nor a table.
    """
    fs, root = open_fs(url)
    if list_versions(fs, root):
        raise Conflict(
            f"{full_name(fs, root)} already holds a table: append to it, or choose another place"
        )
    source = iter(tables)
    if schema is None:
        first = next(source, None)
        if first is None:
            raise StorageError(
                f"cannot create {full_name(fs, root)} from no tables without a schema"
            )
        schema = first.schema
        source = chain([first], source)
    check_schema(schema, full_name(fs, root))
    with _discarded_on_error(fs, root) as staged:
        for piece in _pieces(source, schema, rows_per_part):
            staged.append(stage(url, piece, format=format, rows_per_group=rows_per_group))
        return _publish(url, staged, schema, properties, version=1)


def append(
    url: str,
    tables: Iterable[pa.Table],
    *,
    format: Format = Format.PARQUET,
    rows_per_part: int = ROWS_PER_PART,
    rows_per_group: int = ROWS_PER_GROUP,
    properties: Mapping[str, str] | None = None,
) -> Snapshot:
    """Append ``tables`` as the next version. ``properties`` are added to the existing ones.

    Any number of processes may append at once: each one's rows get in, together, in the order of
    their commits. TableNotFound if there is none; StorageError if one of ``tables`` does not fit;
    Conflict if others always win.
    """
    fs, root = open_fs(url)
    latest = _latest(fs, root)
    if latest is None:
        raise TableNotFound(
            f"no table at {full_name(fs, root)} to append to: create_table makes one"
        )
    with _discarded_on_error(fs, root) as staged:
        for piece in _pieces(tables, latest.schema, rows_per_part):
            staged.append(stage(url, piece, format=format, rows_per_group=rows_per_group))
        return _publish(url, staged, latest.schema, properties)


def stage(
    url: str,
    table: pa.Table,
    *,
    format: Format = Format.PARQUET,
    rows_per_group: int = ROWS_PER_GROUP,
    bytes_per_group: int | None = None,
) -> Part:
    """Write ``table`` as a part of the table at ``url`` that no reader sees until a ``commit``
    lists it.

    A row group has at most ``rows_per_group`` rows and, if given, ``bytes_per_group`` bytes before
    they are encoded; a row that is larger is one by itself.

    StorageError if the format cannot give a column back as it is.
    """
    back = decode_footer(encode(table.schema.empty_table(), format, 1), format).schema
    differs = difference(table.schema, back)
    if differs:
        raise StorageError(
            f"this table stored as {format} {differs}: cast it first, or use another format"
        )
    return put_part(
        url,
        f"{DATA}/{uuid4().hex}.{format}",
        table=table,
        format=format,
        rows_per_group=rows_per_group,
        bytes_per_group=bytes_per_group,
    )


def commit(
    url: str,
    parts: Sequence[Part],
    *,
    schema: pa.Schema | None = None,
    properties: Mapping[str, str] | None = None,
    new: bool = False,
    replace: bool = False,
) -> Snapshot:
    """Publish staged ``parts``, in this order, as the next version; the first if there is no table
    yet.

    ``new`` makes it the first version of a table, or raises Conflict if there is one. ``replace``
    makes a version of these parts, ``schema`` and properties alone; readers of earlier versions
    still have theirs.

    Reads their footers, and refuses a part that is not what its stager said (CorruptPart) or does
    not fit ``schema``, which defaults to the first part's, or to the table (StorageError).
    Committing parts that are all there already changes nothing, so a committer that is not sure
    whether it succeeded does it again.
    """
    fs, root = open_fs(url)
    bad = [part.path for part in parts if not is_below(part.path)]
    if bad:
        raise StorageError(f"part paths {bad} do not lie below {full_name(fs, root)}")
    if len({part.path for part in parts}) < len(parts):
        raise StorageError(f"the parts to commit to {full_name(fs, root)} name one part twice")
    latest = None
    if not replace:
        latest = _latest(fs, root)
    footers = read_footers(fs, root, [part.path for part in parts])
    if schema is None and latest:
        schema = latest.schema
    elif schema is None and footers:
        schema = footers[0].schema
    if schema is None:
        raise StorageError(f"cannot create {full_name(fs, root)} from no parts without a schema")
    check_schema(schema, full_name(fs, root))
    for part, footer in zip(parts, footers, strict=True):
        where = full_name(fs, at(root, part.path))
        if footer.groups != part.groups:
            raise CorruptPart(
                where, f"it has {sum(footer.groups)} rows, and {part.rows} were staged"
            )
        differs = difference(schema, footer.schema)
        if differs:
            raise StorageError(f"{where} {differs}")
    version = None
    if new:
        version = 1
    return _publish(url, parts, schema, properties, version=version, replace=replace)


def _publish(
    url: str,
    parts: Sequence[Part],
    schema: pa.Schema,
    properties: Mapping[str, str] | None,
    version: int | None = None,
    replace: bool = False,
) -> Snapshot:
    """Create the manifest of exactly ``version``, or raise Conflict; for None, of the next free
    version. ``replace`` leaves out what earlier versions have.
    """
    fs, root = open_fs(url)
    for name, value in (properties or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise StorageError(
                f"property {name!r}: {value!r} of {full_name(fs, root)} is not a string"
            )
    token = uuid4().hex
    for attempt in range(_ATTEMPTS):
        latest = None
        if version is None:
            latest = _latest(fs, root)
        number = 1
        if latest:
            number = latest.version + 1
        if replace:
            latest = None
        if latest and (differs := difference(latest.schema, schema)):
            raise StorageError(f"cannot commit to {full_name(fs, root)}: the new schema {differs}")
        if latest and parts and not _all_new(latest, parts, full_name(fs, root)):
            return _snapshot(absolute(url), latest)
        manifest = Manifest(
            version=number,
            commit=token,
            schema=latest.schema if latest else schema,
            parts=(*(latest.parts if latest else ()), *parts),
            properties={**(latest.properties if latest else {}), **(properties or {})},
        )
        try:
            write_exclusive(fs, manifest_path(root, manifest.version), manifest.to_json())
        except Conflict:
            if version is not None:
                raise
            # so that many writers do not stay in step
            time.sleep(random.uniform(0, min(0.5, 0.005 * 2**attempt)))
            continue
        return _snapshot(absolute(url), manifest)
    raise Conflict(
        f"{full_name(fs, root)}: {_ATTEMPTS} times another writer committed first; try again"
    )


@contextmanager
def _discarded_on_error(fs: AbstractFileSystem, root: str) -> Iterator[list[Part]]:
    """Yield a list for staged parts, which are deleted if the block raises StorageError.

    After any other error they stay: where a reply was lost, the manifest that lists them may be
    there.
    """
    staged: list[Part] = []
    try:
        yield staged
    except StorageError:
        for part in staged:
            with suppress(OSError):
                fs.rm_file(at(root, part.path))
        raise


def _all_new(latest: Manifest, parts: Sequence[Part], where: str) -> bool:
    """Return True if none of ``parts`` is in ``latest``, False if all are; StorageError if some
    are.
    """
    there = {part.path for part in latest.parts}
    known = [part.path for part in parts if part.path in there]
    if known and len(known) < len(parts):
        raise StorageError(f"{where} already has {known}, but not the other parts of this commit")
    return not known


def _latest(fs: AbstractFileSystem, root: str) -> Manifest | None:
    versions = list_versions(fs, root)
    if versions:
        return read_manifest(fs, root, versions[-1])
    return None


def _snapshot(url: str, manifest: Manifest) -> Snapshot:
    digest = sha256(manifest.to_json()).hexdigest()
    return Snapshot(
        url,
        manifest.version,
        manifest.schema,
        manifest.parts,
        manifest.properties,
        base=url,
        digest=digest,
    )


def _pieces(tables: Iterable[pa.Table], schema: pa.Schema, rows: int) -> Iterator[pa.Table]:
    """Yield the rows of ``tables`` in tables of exactly ``rows``, the last one with the rest;
    none for no rows.
    """
    if rows < 1:
        raise ValueError(f"rows_per_part={rows} must be at least 1")
    held: list[pa.Table] = []
    count = 0
    for index, table in enumerate(tables):
        rest = conform(table, schema, f"table {index}")
        while rest.num_rows:
            head = rest.slice(0, rows - count)
            rest = rest.slice(head.num_rows)
            held.append(head)
            count += head.num_rows
            if count == rows:
                yield pa.concat_tables(held)
                held = []
                count = 0
    if held:
        yield pa.concat_tables(held)
