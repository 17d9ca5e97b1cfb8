"""Finds and opens what a dataset is imported from: files, globs, folders, saved Hugging Face
datasets, on any URL.

What comes out are ``InputRows``s: a schema, and a function that reads the rows some megabytes at a
time. Nothing that is read is trusted: there is no pickle, lists' offsets and texts are validated,
and a batch has a bound.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from glob import escape, has_magic

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage import (
    PartsDiffer,
    Snapshot,
    StorageError,
    TableNotFound,
    full_name,
    is_below,
    join,
    list_files,
    open_fs,
    open_input,
    open_table,
)
from siirl_storage.formats import FIRST_BYTES, stand_in

from siirl_dask.coordinator import data_files, splits_of
from siirl_dask.datasets.ecosystem_rows import EcosystemRows
from siirl_dask.datasets.text_files import JsonFiles, open_csv
from siirl_dask.errors import DataError, UserError, counted, did_you_mean
from siirl_dask.planner.spec.ecosystems import ecosystem_name

MAX_BATCH_BYTES = 2**30
"""Bytes that one batch of rows may take in memory."""
_LARGEST_RECORD = 2**24  # bytes of a saved dataset's own JSON files
_RECORDS = (
    "dataset_info.json",
    "dataset_infos.json",
    "state.json",
    "dataset_dict.json",
    "config.json",
)
_MODEL_FILES = (".safetensors", "tokenizer_config.json")
_ARROW_FILE = b"ARROW1"  # the first bytes of Arrow's file format; its streams have none


class InputKind(StrEnum):
    """Kind of a file, by the ending of its name."""

    PARQUET = "Parquet"
    ARROW = "Arrow"
    JSON = "JSON"
    CSV = "CSV"


_ENDINGS = {
    ".parquet": InputKind.PARQUET,
    ".arrow": InputKind.ARROW,
    ".feather": InputKind.ARROW,
    ".jsonl": InputKind.JSON,
    ".ndjson": InputKind.JSON,
    ".json": InputKind.JSON,
    ".csv": InputKind.CSV,
    ".tsv": InputKind.CSV,
}
_COMPRESSED = (".gz", ".zst")  # of text files


@dataclass(frozen=True, slots=True)
class InputRows:
    """Rows that can be read once, in order."""

    name: str
    """Name for messages: a file, or the source that was given."""
    source: str
    """The source as it was given."""
    schema: pa.Schema
    """Columns and types; those of its first rows for JSON, until ``settled``."""
    rows: int | None
    """Number of rows, where it is known before they are read."""
    snapshot: Snapshot | None
    """The Parquet or Arrow files behind it; None for files of another kind."""
    batches: Callable[[], Iterator[pa.RecordBatch]]
    """Yields the rows; TypesChanged if some do not have the types of the first, as JSON's may
    not."""
    json: JsonFiles | None = None
    skipped: tuple[str, ...] = ()
    """Other files that its source names, whose kind is not read."""

    def settled(self) -> InputRows:
        """Return it with the schema that all rows have."""
        if self.json is None:
            return self
        self.json.settle()
        return replace(self, schema=self.json.schema)

    def remarks(self) -> Sequence[str]:
        """Return texts for the user on what is not read, and on how the values were read, once all
        are.
        """
        texts = []
        if self.json is not None:
            texts = list(self.json.remarks)
        if self.skipped:
            texts.append(
                f"{counted(len(self.skipped), 'file')}, such as {self.skipped[0]!r}, "
                f"{'is' if len(self.skipped) == 1 else 'are'} of no known kind, and not read: "
                f"expected names that end in {', '.join(_ENDINGS)}, text also in "
                f"{', '.join(_COMPRESSED)}"
            )
        return texts


def open_inputs(source: str, separator: str | None = None) -> list[InputRows]:
    """Open all that ``source`` names: a file, a glob, a folder of files, a table, or a dataset
    saved on disk.

    ``separator`` is what CSV files have between columns; None: a comma, or a tab where they are
    called .tsv. DataError when there is nothing, when it is unclear what is meant, or when it
    cannot be read.
    """
    if not source.strip():
        raise DataError(f"{source!r} names no source: expected a file, a folder or a table")
    name = ecosystem_name(source)
    if name is not None:
        rows = EcosystemRows(name)
        found = InputRows(
            name=source,
            source=source,
            schema=rows.schema,
            rows=None,
            snapshot=None,
            batches=rows.batches,
        )
        return [found]
    with readable(source):
        fs, path = open_fs(source)
        if has_magic(path) and not fs.exists(path):
            found = fs.glob(_pattern(fs, path), detail=True)
            files = {
                str(name): kind_of(str(name))
                for name, info in found.items()
                if info["type"] == "file"
            }
            known = {name: kind for name, kind in files.items() if kind}
            opened = _open_files(source, fs, known, separator)
            return _with_skipped(opened, [name for name in files if name not in known])
        if fs.isfile(path):
            kind = kind_of(path)
            if kind is None:
                raise DataError(
                    f"{source!r} is of no known kind: expected a name that ends in "
                    f"{', '.join(_ENDINGS)}"
                )
            return _open_files(source, fs, {path: kind}, separator)
        if fs.isdir(path):
            return _open_folder(source, fs, path, separator)
        raise DataError(f"there is nothing at {source!r}{_nearest(fs, path)}")


def _pattern(fs: AbstractFileSystem, path: str) -> str:
    """Return the glob ``path``, in which the name of a folder that is there stands for itself."""
    steps = path.split("/")
    for index, step in enumerate(steps[:-1]):
        if has_magic(step) and fs.isdir("/".join(path.split("/")[: index + 1])):
            steps[index] = escape(step)
    return "/".join(steps)


def exists(url: str) -> bool:
    """Return whether there is a table at ``url``. DataError if the storage cannot be reached, or
    what is there is damaged.
    """
    with readable(url):
        try:
            open_table(url)
        except TableNotFound:
            return False
    return True


def kind_of(name: str) -> InputKind | None:
    """Return the kind of a file by the end of its name; None for one that is not read."""
    lower = name.lower()
    compression = next((ending for ending in _COMPRESSED if lower.endswith(ending)), "")
    stem = lower.removesuffix(compression)
    kind = next((kind for ending, kind in _ENDINGS.items() if stem.endswith(ending)), None)
    if compression and kind not in (InputKind.JSON, InputKind.CSV):
        return None
    return kind


@contextmanager
def readable(source: str) -> Iterator[None]:
    """Turn errors over what is stored at ``source``, or over reaching it, into a DataError that
    names it.
    """
    try:
        yield
    except UserError:
        raise
    except (StorageError, pa.ArrowException) as error:
        raise DataError(f"{source!r}: {error}") from error
    except FileNotFoundError as error:  # such as a hub's repository, or a revision of it
        raise DataError(f"{source!r} is not there: {error}") from error
    except (ValueError, OverflowError) as error:  # JSON, UTF-8, and what a hub refuses as a name
        raise DataError(f"{source!r} cannot be read: {error}") from error
    except Exception as error:  # drivers of remote storage raise what they like
        raise DataError(
            f"{source!r}: its storage cannot be reached: {type(error).__name__}: {error}"
        ) from error


def _nearest(fs: AbstractFileSystem, path: str) -> str:
    folder, _, name = path.rstrip("/").rpartition("/")
    try:
        names = [
            str(found).rstrip("/").rpartition("/")[2]
            for found in fs.ls(folder or "/", detail=False)
        ]
    except Exception:  # a folder or a hub's repository that is not there either
        return ""
    return did_you_mean(name, names)


def _open_folder(
    source: str,
    fs: AbstractFileSystem,
    path: str,
    separator: str | None,
) -> list[InputRows]:
    files = list_files(fs, path)
    if any(re.fullmatch(r"_snapshots/\d{6,}\.json", name) for name in files):
        return [_open_table(source, source)]
    if "dataset_dict.json" in files:
        splits = _record(fs, f"{path}/dataset_dict.json").get("splits")
        names = "its folders"
        if isinstance(splits, list):
            names = ", ".join(join(source, str(split)) for split in splits)
        raise DataError(f"{source!r} holds the splits of a dataset: name one of {names}")
    if "state.json" in files and "dataset_info.json" in files:
        listed = _saved_files(source, _record(fs, f"{path}/state.json"))
        return _open_files(
            source,
            fs,
            {f"{path.rstrip('/')}/{name}": InputKind.ARROW for name in listed},
            separator,
        )
    if "config.json" in files and any(name.endswith(_MODEL_FILES) for name in files):
        raise DataError(
            f"{source!r} holds a model, and no rows: expected a file or a folder of a dataset"
        )
    kinds = {
        name: kind for name in sorted(files) if not _is_hidden(name) and (kind := kind_of(name))
    }
    if len(set(kinds.values())) > 1:
        kinds = {
            name: kind for name, kind in kinds.items() if name.rpartition("/")[2] not in _RECORDS
        }
    skipped = [name for name in data_files(files) if name not in kinds]
    splits = splits_of(kinds)
    if len(splits) > 1:
        raise DataError(
            f"{source!r} holds files of several splits ({', '.join(splits)}): name one, as in "
            f"{join(source, re.sub(r'[^/]*$', '', next(iter(kinds)).lstrip('/')) + splits[-1] + '*')}"
        )
    if set(kinds.values()) == {InputKind.PARQUET}:
        # with columns from the names of folders
        try:
            return _with_skipped([_open_table(source, source)], skipped)
        except PartsDiffer:
            if any("=" in name.rpartition("/")[0] for name in kinds):
                raise
            # one by one they are inputs of different columns, as from a glob
    opened = _open_files(
        source, fs, {f"{path.rstrip('/')}/{name}": kind for name, kind in kinds.items()}, separator
    )
    return _with_skipped(opened, skipped)


def _with_skipped(opened: list[InputRows], skipped: Sequence[str]) -> list[InputRows]:
    """Return inputs whose first one remarks on files that are not read."""
    first, *others = opened
    return [replace(first, skipped=tuple(sorted(skipped))), *others]


def _is_hidden(name: str) -> bool:
    return any(step.startswith(("_", ".")) for step in name.split("/"))


def _record(fs: AbstractFileSystem, path: str) -> dict[str, object]:
    """Return one of the JSON objects that describe a saved dataset."""
    if int(fs.info(path)["size"]) > _LARGEST_RECORD:
        raise DataError(
            f"{full_name(fs, path)} is larger than {_LARGEST_RECORD} bytes: it is no record of a "
            "dataset"
        )
    document = json.loads(fs.cat_file(path))
    if not isinstance(document, dict):
        raise DataError(
            f"{full_name(fs, path)} is no JSON object, and should tell the files of a saved dataset"
        )
    return document


def _saved_files(source: str, state: dict[str, object]) -> list[str]:
    """Return the data files that a saved dataset lists, in its order."""
    listed = state.get("_data_files")
    entries = []
    if isinstance(listed, list):
        entries = listed
    named = [entry.get("filename") for entry in entries if isinstance(entry, dict)]
    names = [name for name in named if isinstance(name, str) and is_below(name)]
    if not names or len(names) < len(entries):
        raise DataError(
            f"{source!r}: its state.json lists no data files below it, and a saved dataset's does"
        )
    return names


def _open_files(
    source: str,
    fs: AbstractFileSystem,
    kinds: dict[str, InputKind],
    separator: str | None,
) -> list[InputRows]:
    """Open files of one kind, given their paths on ``fs``."""
    present = sorted(set(kinds.values()))
    if not present:
        raise DataError(
            f"no files at {source!r}: looked for names that end in {', '.join(_ENDINGS)}"
        )
    if len(present) > 1:
        raise DataError(
            f"{source!r} names files of several kinds ({', '.join(present)}): give them one by one"
        )
    names = list(kinds)
    match present[0]:
        case InputKind.JSON:
            found = JsonFiles(fs, names)
            return [
                InputRows(
                    source,
                    source,
                    schema=found.schema,
                    rows=None,
                    snapshot=None,
                    batches=found.batches,
                    json=found,
                )
            ]
        case InputKind.CSV:
            one = partial(_open_csv, source, fs, separator)
        case _:
            one = partial(_open_file, source, fs)
    with ThreadPoolExecutor(
        min(16, len(names))
    ) as pool:  # on an object store each costs some round trips
        return list(pool.map(one, names))


def _open_csv(source: str, fs: AbstractFileSystem, separator: str | None, path: str) -> InputRows:
    schema, batches = open_csv(fs, path, separator)
    return InputRows(
        full_name(fs, path),
        source,
        schema=schema,
        rows=None,
        snapshot=None,
        batches=batches,
    )


def _open_file(source: str, fs: AbstractFileSystem, path: str) -> InputRows:
    """Open one Parquet or Arrow file."""
    url = full_name(fs, path)
    if kind_of(path) is InputKind.ARROW:
        with open_input(fs, path) as file:
            first = file.read(FIRST_BYTES)
            other = stand_in(first)
            if other is not None:
                raise DataError(f"{url} cannot be read: {other}")
            if not first.startswith(_ARROW_FILE):
                file.seek(0)
                schema = pa.ipc.open_stream(file).schema
                return InputRows(
                    url,
                    source,
                    schema=schema,
                    rows=None,
                    snapshot=None,
                    batches=partial(_stream_batches, fs, path),
                )
    return _open_table(source, url)


def _open_table(source: str, url: str) -> InputRows:
    snapshot = open_table(url)
    batches = partial(snapshot.batches, max_bytes=MAX_BATCH_BYTES)
    return InputRows(
        url,
        source,
        schema=snapshot.schema,
        rows=snapshot.num_rows,
        snapshot=snapshot,
        batches=batches,
    )


def _stream_batches(fs: AbstractFileSystem, path: str) -> Iterator[pa.RecordBatch]:
    with open_input(fs, path) as file:
        for batch in pa.ipc.open_stream(file):
            # a damaged offset must end here, not in the code that follows it
            batch.validate(full=True)
            if batch.nbytes > MAX_BATCH_BYTES:
                where = full_name(fs, path)
                raise DataError(
                    f"{where}: a batch takes {batch.nbytes} bytes, and at most {MAX_BATCH_BYTES} "
                    "may"
                )
            yield batch


def total_rows(inputs: Sequence[InputRows]) -> int | None:
    """Return the number of rows in all, or None where one does not know its own."""
    known = [one.rows for one in inputs if one.rows is not None]
    if len(known) < len(inputs):
        return None
    return sum(known)
