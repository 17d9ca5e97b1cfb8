"""A snapshot on disk: ``_snapshots/000001.json``. A manifest that is read is not trusted.

The schema is Arrow's own serialization in base64; ``columns`` and each part's ``rows`` repeat what
people and other tools want to read, and are not read here.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem

from siirl_storage.errors import StorageError
from siirl_storage.files import at, full_name, list_files
from siirl_storage.parts import Part
from siirl_storage.schemas import check_schema

FOLDER = "_snapshots"  # readers of plain Parquet folders skip names that begin with an underscore
_KIND = "siirl_storage 1"
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a table."""

    version: int
    commit: str
    """Id of the attempt that wrote it, by which a writer whose reply was lost finds out that it
    had won."""
    schema: pa.Schema
    parts: tuple[Part, ...]
    properties: Mapping[str, str]

    def to_json(self) -> bytes:
        document = {
            "kind": _KIND,
            "version": self.version,
            "commit": self.commit,
            "properties": dict(self.properties),
            "columns": {field.name: str(field.type) for field in self.schema},
            "schema": base64.b64encode(self.schema.serialize()).decode(),
            "parts": [part_entry(part) for part in self.parts],
        }
        return json.dumps(document, indent=1).encode()


def manifest_path(root: str, version: int) -> str:
    return at(root, f"{FOLDER}/{version:06d}.json")


def list_versions(fs: AbstractFileSystem, root: str) -> list[int]:
    """Return the committed versions of the table at ``root``, ascending; empty if it is no
    table.
    """
    stems = [
        name.removesuffix(".json")
        for name in list_files(fs, at(root, FOLDER))
        if name.endswith(".json")
    ]
    return sorted(
        int(stem)
        for stem in stems
        if stem.isascii() and stem.isdigit() and f"{int(stem):06d}" == stem
    )


def read_manifest(fs: AbstractFileSystem, root: str, version: int) -> Manifest:
    """Read the manifest of a version. FileNotFoundError if there is none; StorageError if it is
    not valid.
    """
    path = manifest_path(root, version)
    return parse_manifest(fs.cat_file(path), version, full_name(fs, path))


def parse_manifest(data: bytes, version: int, where: str) -> Manifest:
    """Return the manifest in ``data``. StorageError, naming ``where``, if it is not valid or not
    of ``version``.
    """
    try:
        return _from_document(json.loads(data), version)
    except (
        ValueError,
        RecursionError,
        StorageError,
    ) as error:  # JSON, UTF-8, base64, and what is raised below
        raise StorageError(f"{where} is not a usable snapshot manifest: {error}") from error


def _from_document(document: Any, version: int) -> Manifest:
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise StorageError(
            f'not an object of kind "{_KIND}" (a newer version of this package may have written it)'
        )
    if _natural(document, "version") != version:
        raise StorageError(f"it says version {document['version']}, its name {version}")
    properties = _get(document, "properties", dict)
    if not all(isinstance(value, str) for value in properties.values()):
        raise StorageError('a value of "properties" is not a string')
    parts = tuple(parse_part(entry) for entry in _get(document, "parts", list))
    if len({part.path for part in parts}) < len(parts):
        raise StorageError("it lists a part twice")
    schema = _schema(_get(document, "schema", str))
    return Manifest(version, _get(document, "commit", str), schema, parts, properties)


def _schema(text: str) -> pa.Schema:
    raw = base64.b64decode(text, validate=True)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(raw))
        str(schema)  # names are decoded only when they are looked at
        check_schema(schema, "its schema")
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"its schema: {error}") from error
    return schema


def part_entry(part: Part) -> dict[str, Any]:
    """Return a part as plain data, as manifests and records of folders list it."""
    entry = {
        "path": part.path,
        "rows": part.rows,
        "bytes": part.nbytes,
        "groups": list(part.groups),
    }
    if part.sha256 is None:
        return entry
    return {**entry, "sha256": part.sha256}


def parse_part(entry: Any) -> Part:
    """Return the part that ``part_entry`` described. StorageError for anything else."""
    if not isinstance(entry, dict):
        raise StorageError("a part is not an object")
    path = _get(entry, "path", str)
    groups = _get(entry, "groups", list)
    if not is_below(path):
        raise StorageError(f"part path {path!r} does not lie below the table")
    if not all(type(rows) is int and rows >= 0 for rows in groups):
        raise StorageError(f"the row groups of part {path!r} are not counts of rows")
    sha256 = entry.get("sha256")
    if sha256 is not None and not (isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
        raise StorageError(f"the digest of part {path!r} is not 64 hexadecimal digits")
    return Part(path, _natural(entry, "bytes"), tuple(groups), sha256)


def is_below(path: str) -> bool:
    """Tell whether a relative path stays below its folder, on any filesystem."""
    if not path.isprintable() or "\\" in path:
        return False
    return {"", ".", ".."}.isdisjoint(path.split("/"))


def _natural(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key)
    if type(value) is not int or value < 0:  # bool is an int to isinstance
        raise StorageError(f'"{key}" is missing or not a natural number')
    return value


def _get(entry: dict[str, Any], key: str, kind: type) -> Any:
    value = entry.get(key)
    if not isinstance(value, kind):
        raise StorageError(f'"{key}" is missing or not a {kind.__name__}')
    return value
