"""Tables without a manifest, which other tools wrote: one Parquet or Arrow file, or a folder of
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import pyarrow as pa
from fsspec import AbstractFileSystem

from siirl_storage import hive
from siirl_storage.committed import by_folder, is_numbered, whole_folders
from siirl_storage.errors import PartsDiffer, TableNotFound
from siirl_storage.files import at, check_reached, full_name, list_files, open_fs, parent
from siirl_storage.formats import ENDINGS, Footer, format_of, read_footer
from siirl_storage.parts import Part
from siirl_storage.schemas import difference
from siirl_storage.snapshot import Snapshot

DATA = "data"
_STAGED = re.compile(rf"{DATA}/[0-9a-f]{{32}}\.(parquet|arrow)", re.ASCII)


def open_plain(url: str) -> Snapshot:
    """Open the files at ``url`` as one table, sorted by path. Reads every footer, and no data.

    Files and folders whose names begin with ``_`` or ``.`` are skipped, as Spark and Arrow do, and
    so are parts that the record of their folder does not list (see committed.py). TableNotFound if
    nothing is left; CorruptPart for a file that cannot be read; PartsDiffer if two files do not
    have the same columns.
    """
    fs, root = open_fs(url)
    files = list_files(fs, root)
    base = url
    left_out: set[str] = set()
    if "" not in files:
        left_out = _uncommitted(fs, root, files)
    else:
        base = parent(url)
        name = root.rpartition("/")[2]
        root = open_fs(base)[1]
        files = {name: files[""]}
    names = sorted(
        name for name in files if format_of(name) and not _is_hidden(name) and name not in left_out
    )
    if not names:
        check_reached(fs, root)
        raise TableNotFound(_nothing_here(full_name(fs, root), list(files)))
    footers = read_footers(fs, root, names)
    parts = tuple(
        Part(name, files[name], footer.groups) for name, footer in zip(names, footers, strict=True)
    )
    listed = [
        (part.path, part.nbytes, footer.digest) for part, footer in zip(parts, footers, strict=True)
    ]
    digest = sha256(json.dumps(listed).encode()).hexdigest()
    return Snapshot(
        url, None, _common_schema(fs, root, names, footers), parts, base=base, digest=digest
    )


def read_footers(fs: AbstractFileSystem, root: str, names: Sequence[str]) -> list[Footer]:
    """Return the footers of the parts ``names`` below ``root``. CorruptPart for the first that
    cannot be read.
    """
    with ThreadPoolExecutor(
        max_workers=16
    ) as pool:  # on an object store each costs a few round trips
        return list(pool.map(lambda name: read_footer(fs, at(root, name)), names))


def _uncommitted(fs: AbstractFileSystem, root: str, files: Mapping[str, int]) -> set[str]:
    """Return the files of folders whose parts a record commits, without those that it lists."""
    folders = {
        folder: names for folder, names in by_folder(files).items() if any(map(is_numbered, names))
    }
    theirs = set()
    for folder, names in folders.items():
        for name in names:
            theirs.add(f"{folder}/{name}" if folder else name)
    numbered = {name: files[name] for name in theirs}
    return theirs - {name for names in whole_folders(fs, root, numbered).values() for name in names}


def _is_hidden(name: str) -> bool:
    # What a writer staged is no table until it is committed, even if the writer died and left
    # nothing else there.
    if any(step.startswith(("_", ".")) for step in name.split("/")):
        return True
    return _STAGED.fullmatch(name) is not None


def _nothing_here(where: str, files: Sequence[str]) -> str:
    looked = (
        f"no table at {where}: looked for a snapshot in _snapshots/, and for files that end in "
        f"{ENDINGS}"
    )
    if any(_STAGED.fullmatch(name) for name in files):
        return f"{looked}; there are only parts in {DATA}/ that nobody has committed"
    if any(is_numbered(name.rpartition("/")[2]) for name in files):
        return (
            f"{looked}; there are only parts that no record _parts-NNNN.json beside them lists as "
            "whole"
        )
    if files:
        return f"{looked}; found {len(files)} other files"
    return f"{looked}; there are no files at all"


def _common_schema(
    fs: AbstractFileSystem,
    root: str,
    names: Sequence[str],
    footers: Sequence[Footer],
) -> pa.Schema:
    keys = hive.fields(names)
    schema: pa.Schema | None = None
    for name, footer in zip(names, footers, strict=True):
        own = footer.schema
        for key in hive.values(name):
            if key not in own.names:
                own = own.append(keys[key])
        if schema is None:
            schema = own
            continue
        differs = difference(_with_types(schema, own), own)
        if differs:
            raise PartsDiffer(
                f"{full_name(fs, at(root, name))} does not go with {names[0]}: it {differs}"
            )
        schema = pa.unify_schemas([schema, own])
    assert schema is not None
    return schema


def _with_types(schema: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return ``schema`` with the types of ``other`` for columns whose type is ``null`` so far."""
    return pa.schema(
        [
            other.field(f.name) if pa.types.is_null(f.type) and f.name in other.names else f
            for f in schema
        ]
    )
