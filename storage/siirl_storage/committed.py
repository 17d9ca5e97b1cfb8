"""Folders of parts that one record commits, so that of several writers in turn exactly one counts:

    step=000007/part-0003-00002.parquet      part 2 of writer 3
                _parts-0003.json             created exclusively and last: all parts of writer 3

A writer is a number that nobody else has, higher than those before. The parts of the highest record
are the folder's; parts without a record, which a writer that was cut off may still add at any time,
are not. Folders whose names say how many parts there are (see parts.py) need no record.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem

from siirl_storage.errors import StorageError
from siirl_storage.files import at, full_name, list_files, open_fs, write_exclusive
from siirl_storage.formats import ROWS_PER_GROUP, Format
from siirl_storage.manifest import parse_part, part_entry
from siirl_storage.parts import Part, complete_names, put_part

_KIND = "siirl_storage parts 1"
_PART = re.compile(r"part-(\d{4,})-(\d{5,})\.(parquet|arrow)", re.ASCII)
_RECORD = re.compile(r"_parts-(\d{4,})\.json", re.ASCII)


@dataclass(frozen=True, slots=True)
class PartsRecord:
    """The parts that one writer committed to a folder."""

    writer: int
    parts: tuple[Part, ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    """Plain data that the writer says of them. It is not checked here."""


def stage_part(
    url: str,
    writer: int,
    index: int,
    table: pa.Table,
    *,
    format: Format = Format.PARQUET,
    rows_per_group: int = ROWS_PER_GROUP,
) -> Part:
    """Write part ``index`` of ``writer`` into the folder ``url``, whole or not at all, or replace
    it.

    It counts once ``commit_parts`` lists it. StorageError if the format cannot hold a column.
    """
    name = f"part-{writer:04d}-{index:05d}.{format}"
    return put_part(url, name, table, format, rows_per_group)


def commit_parts(
    url: str,
    writer: int,
    parts: Sequence[Part],
    about: Mapping[str, Any] | None = None,
) -> None:
    """Commit ``parts``, all of ``writer``'s, as those of the folder ``url``. Doing it again changes
    nothing.

    ``about`` is plain data that goes into the record. Conflict if ``writer`` has committed others
    there.
    """
    fs, root = open_fs(url)
    path = at(root, f"_parts-{writer:04d}.json")
    document = {"kind": _KIND, "writer": writer, "parts": [part_entry(part) for part in parts]}
    if about:
        document["about"] = dict(about)
    document["sha256"] = _digest(document)
    write_exclusive(fs, path, json.dumps(document, indent=1, allow_nan=False).encode())


def read_record(url: str) -> PartsRecord | None:
    """Return the newest record of the folder ``url``; None if there is none, or a part that it
    lists is missing.

    StorageError for a record that is damaged.
    """
    fs, root = open_fs(url)
    files = list_files(fs, root)
    writers = _records(name for name in files if "/" not in name)
    if not writers:
        return None
    record = _read_record(fs, root, "", max(writers))
    if all(files.get(part.path) == part.nbytes for part in record.parts):
        return record
    return None


def complete_parts(url: str) -> list[str] | None:
    """Return the names of the parts in the folder ``url`` in order, if all are there; None if some
    are missing.

    These are the parts of the newest record, or without one those whose names say how many there
    are. Two that disagree on that, or are the same part in two formats, make None.
    """
    fs, root = open_fs(url)
    return whole_folders(fs, root, list_files(fs, root)).get("")


def whole_folders(
    fs: AbstractFileSystem, root: str, files: Mapping[str, int]
) -> dict[str, list[str]]:
    """Return the parts of each complete folder among ``files``: paths below ``root``, with their
    sizes.

    StorageError for a record that is damaged.
    """
    folders = by_folder(files)
    newest = {
        folder: max(records) for folder, names in folders.items() if (records := _records(names))
    }
    with ThreadPoolExecutor(max_workers=16) as pool:  # on an object store each costs a round trip
        read = pool.map(partial(_read_record, fs, root), newest.keys(), newest.values())
        listed = dict(zip(newest, read, strict=True))
    whole = {}
    for folder, names in folders.items():
        if folder in listed:
            parts = listed[folder].parts
            if all(names.get(part.path) == part.nbytes for part in parts):
                whole[folder] = [_below(folder, part.path) for part in parts]
        elif complete := complete_names(names):
            whole[folder] = [_below(folder, name) for name in complete]
    return whole


def recorded_parts(
    fs: AbstractFileSystem,
    root: str,
    folder: str,
    names: Iterable[str],
) -> list[Part] | None:
    """Return the parts that the newest record among the ``names`` in a folder lists, whether they
    are there or not.

    None without a record. StorageError for a record that is damaged.
    """
    record = newest_record(fs, root, folder, names)
    if record is None:
        return None
    return list(record.parts)


def newest_record(
    fs: AbstractFileSystem,
    root: str,
    folder: str,
    names: Iterable[str],
) -> PartsRecord | None:
    """Return the newest record among the ``names`` in a folder; None without one.

    StorageError for a record that is damaged.
    """
    records = _records(names)
    if records:
        return _read_record(fs, root, folder, max(records))
    return None


def record_name(names: Iterable[str]) -> str | None:
    """Return the name of the newest record among ``names``; None if there is none."""
    records = _records(names)
    if records:
        return f"_parts-{max(records):04d}.json"
    return None


def by_folder(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return names and sizes of the files of each folder, given paths below a common root."""
    folders: dict[str, dict[str, int]] = defaultdict(dict)
    for path, nbytes in files.items():
        folder, _, name = path.rpartition("/")
        folders[folder][name] = nbytes
    return dict(folders)


def newest_parts(names: Iterable[str]) -> list[str]:
    """Return the names of the parts of the highest writer among ``names``, committed or not."""
    writers = {name: int(matched[1]) for name in names if (matched := _PART.fullmatch(name))}
    newest = max(writers.values(), default=None)
    return sorted(name for name, writer in writers.items() if writer == newest)


def is_numbered(name: str) -> bool:
    """Tell whether ``name`` is that of a part with a writer's number, or of a record."""
    if _PART.fullmatch(name) is not None:
        return True
    return _RECORD.fullmatch(name) is not None


def _records(names: Iterable[str]) -> list[int]:
    return [int(matched[1]) for name in names if (matched := _RECORD.fullmatch(name))]


def _digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without the one that it has."""
    rest = {key: value for key, value in document.items() if key != "sha256"}
    return sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _below(folder: str, name: str) -> str:
    if folder:
        return f"{folder}/{name}"
    return name


def _read_record(fs: AbstractFileSystem, root: str, folder: str, writer: int) -> PartsRecord:
    path = at(root, _below(folder, f"_parts-{writer:04d}.json"))
    try:
        document = json.loads(fs.cat_file(path))
        if (
            not isinstance(document, dict)
            or document.get("kind") != _KIND
            or document.get("writer") != writer
        ):
            raise StorageError(f'not an object of kind "{_KIND}" by writer {writer}')
        parts = tuple(parse_part(entry) for entry in document["parts"])
        about = document.get("about", {})
        if not isinstance(about, dict):
            raise StorageError('"about" is not an object')
        digest = _digest(document)
        if document.get("sha256", digest) != digest:  # earlier versions wrote none
            raise StorageError("it was altered: its own SHA-256 is another one")
    except (KeyError, TypeError, ValueError, RecursionError, StorageError) as error:
        raise StorageError(
            f"{full_name(fs, path)} is not a usable record of parts: {error}"
        ) from error
    outside = [part.path for part in parts if "/" in part.path]
    if outside:
        raise StorageError(f"{full_name(fs, path)} lists {outside[0]!r}, which is not beside it")
    return PartsRecord(writer, parts, about)
