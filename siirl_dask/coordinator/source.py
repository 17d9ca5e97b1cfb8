"""Datasets as a run reads them: one table, or a mixture of several with weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from glob import has_magic
from shlex import quote

import pyarrow as pa
from siirl_storage import (
    PartsDiffer,
    Snapshot,
    StorageError,
    TableNotFound,
    list_files,
    open_fs,
    open_table,
)

from siirl_dask.config import DataConfig, parse_bytes
from siirl_dask.coordinator.transport.messages import check_types
from siirl_dask.errors import ConfigError, DataError, counted, did_you_mean
from siirl_dask.schema import (
    ANSWER,
    IDENTITY,
    ORIGIN,
    PROMPT,
    SOURCE_NAME,
    TYPES,
    is_index_column,
    loaded_type,
    missing_step,
    type_at,
    with_large_offsets,
)

_OWN = (*IDENTITY, *ORIGIN)  # columns that no dataset has
# what names of JSON and CSV end in
_TEXT = re.compile(r"\.(jsonl?|ndjson|csv|tsv)(\.(gz|zst))?$", re.IGNORECASE)
_SPLIT = re.compile(r"(?:^|[-_./])(train|test|validation|valid|val|dev)(?=[-_./]|$)", re.IGNORECASE)
_PACKED = r"\.(gz|bz2|xz|zst|lz4|br|snappy|zip|7z)"
_DATA = re.compile(
    rf"\.((parquet|parq|pq|arrow|feather|jsonl|jsonlines|ndjson|csv|tsv)({_PACKED})?|json{_PACKED})$",
    re.IGNORECASE,
)
_ROW = 8  # bytes that a row takes at least: its place in the order of its row group


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A dataset and how it is read. ``prompt`` and ``answer`` name columns; a dot goes into a
    struct.

    ``batch_size`` None reads everything in one step; ``seed`` None keeps the table's order.
    """

    url: str
    prompt: str
    answer: str
    batch_size: int | None = None
    seed: int | None = None
    read_limit: int = 2 * 2**30
    """Bytes that a worker's rows of a step, or a row group, may take once decoded."""
    keep: int = 2**28
    """Bytes of rows that a worker holds for later steps."""
    table: Snapshot | None = None
    """The table, where it is open already: workers get it from the driver, and read no footer but
    of parts they read.
    """

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self,)

    def each(self, change: Callable[[Source], Source]) -> Source:
        """Return the dataset with its tables changed."""
        return change(self)

    @staticmethod
    def of(
        data: DataConfig,
        *,
        url: str | None = None,
        batch_size: int | None = None,
        seed: int | None = None,
    ) -> Source:
        """Return the table at ``data.url``, or at ``url``, read as ``data`` says."""
        url = data.url if url is None else url
        if url is None:
            raise ConfigError(
                "data.url is not set, and one dataset is expected here: data.sources are for "
                "training"
            )
        memory = parse_bytes("data.memory_limit", data.memory_limit)
        limit = (
            memory if data.read_limit is None else parse_bytes("data.read_limit", data.read_limit)
        )
        return Source(
            url=url,
            prompt=data.prompt,
            answer=data.answer,
            batch_size=batch_size,
            seed=seed,
            read_limit=limit,
            keep=memory // 8,
        )


@dataclass(frozen=True, slots=True)
class Share:
    """A source of a mixture."""

    name: str
    weight: Fraction
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Several sources, of which each step takes prompts by weight. A source that is short starts
    over.
    """

    shares: tuple[Share, ...]
    """In the order of their names, so that it does not matter how they were written."""
    batch_size: int
    seed: int

    @property
    def sources(self) -> tuple[Source, ...]:
        return tuple(share.source for share in self.shares)

    def each(self, change: Callable[[Source], Source]) -> Mixture:
        """Return the dataset with its tables changed."""
        return replace(
            self, shares=tuple(replace(share, source=change(share.source)) for share in self.shares)
        )


Dataset = Source | Mixture


def training_dataset(data: DataConfig, seed: int) -> Dataset:
    """Return the dataset that ``data`` describes for training: ``data.url``, or the mixture of
    ``data.sources``.
    """
    if not data.sources:
        return Source.of(data, batch_size=data.batch_size, seed=seed)
    shares = []
    for name, settings in sorted(data.sources.items()):
        source = Source.of(data, url=settings.url, batch_size=data.batch_size, seed=seed)
        source = replace(
            source, prompt=settings.prompt or data.prompt, answer=settings.answer or data.answer
        )
        # 0.7 is seven tenths, as it was written
        shares.append(Share(name, Fraction(str(settings.weight)), source))
    return Mixture(shares=tuple(shares), batch_size=data.batch_size, seed=seed)


def open_source(source: Source) -> Snapshot:
    """Open the table behind ``source``.

    DataError when it is missing, corrupt, empty, or lacks the columns, and when its storage cannot
    be reached.
    """
    if source.table is not None:
        return source.table
    try:
        snapshot = open_table(source.url)
    except TableNotFound as error:
        refuse_text(source.url)
        raise DataError(f"dataset {source.url!r}: {error}") from error
    except PartsDiffer as error:
        raise DataError(
            f"dataset {source.url!r}: {error}. Make one table of them with\n"
            f"    siirl-dask data import {quote(source.url)} {quote(source.url.rstrip('/') + '-table')}\n"
            "which says what to choose where types have none in common"
        ) from error
    except StorageError as error:
        raise DataError(f"dataset {source.url!r}: {error}") from error
    except Exception as error:  # drivers of remote storage raise what they like
        reason = f"{type(error).__name__}: {error}"
        raise DataError(
            f"dataset {source.url!r}: its storage cannot be reached: {reason}"
        ) from error
    if snapshot.num_rows == 0:
        raise DataError(f"dataset {source.url!r} has no rows: expected at least one")
    splits = splits_of(part.path for part in snapshot.parts) if snapshot.version is None else []
    if len(splits) > 1:
        raise DataError(
            f"dataset {source.url!r} holds files of several splits ({', '.join(splits)}), and a run "
            "that reads them all trains on what it is tested on: name one file or a folder of one "
            "split, or make a table of a split's files with siirl-dask data import"
        )
    source_schema(snapshot.schema, source)
    longest = max(snapshot.row_groups(), key=lambda group: group.rows)
    if longest.rows * _ROW > source.read_limit:
        raise DataError(
            f"dataset {source.url!r}: a row group of {longest.part!r} has {longest.rows} rows, "
            f"more than the {source.read_limit} bytes that may be read at once can hold "
            "(data.read_limit): raise it, or write the dataset with smaller row groups"
        )
    return snapshot


def splits_of(names: Iterable[str]) -> list[str]:
    """Return the splits (train, test, ...) that names of files say they are of."""
    found = set()
    for name in names:
        words = _SPLIT.findall(name)
        if words:
            found.add(words[-1].lower())
    return sorted(found)


def unread_files(source: Source) -> list[str]:
    """Return the files of data in a folder of plain files that a run does not read: of another
    kind, or with another ending.
    """
    snapshot = open_source(source)
    if snapshot.version is not None:
        return []
    read = {part.path for part in snapshot.parts}
    fs, path = open_fs(source.url)
    return [name for name in data_files(list_files(fs, path)) if name not in read]


def data_files(names: Iterable[str]) -> list[str]:
    """Return the names that end as those of files with rows do, of kinds that nothing here reads
    among them, such as ``.jsonl.xz``; not ``.json``, as which many tools write their records.
    """
    return [name for name in _unhidden(names) if _DATA.search(name)]


def _unhidden(names: Iterable[str]) -> list[str]:
    """Return names of files without those that tools hide: with a step that begins with _ or a
    dot.
    """
    shown = []
    for name in names:
        steps = name.split("/")
        if not any(step.startswith(("_", ".")) for step in steps):
            shown.append(name)
    return shown


def refuse_text(url: str) -> None:
    """Raise DataError where JSON or CSV is at ``url``, which has no table, or where it is a pattern
    of files: with the command that makes a table of them.
    """
    fs, path = open_fs(url)
    files = fs.glob(path) if has_magic(path) else []
    if files:
        raise DataError(
            f"dataset {url!r} is a pattern of {counted(len(files), 'file')}, and a run reads one "
            "file, a folder, or a table: name their folder, or make a table of them with\n"
            f"    siirl-dask data import {quote(url)} TABLE\n"
            "and name TABLE instead"
        )
    found = _TEXT.search(path)
    table = _TEXT.sub("", url)
    if found is None:
        names = _unhidden(list_files(fs, path))
        if not names or not all(_TEXT.search(name) for name in names):
            return
        table = f"{url.rstrip('/')}-table"
    raise DataError(
        f"dataset {url!r} is JSON or CSV, and a run reads Parquet, Arrow, and tables. Make one "
        "with\n"
        f"    siirl-dask data import {quote(url)} {quote(table)}\n"
        f"and name {table!r} instead"
    )


def exists(url: str) -> bool:
    """Return whether there is a table at ``url``, also a damaged one.

    DataError if the storage cannot be reached, and where JSON or CSV is there, which no run reads.
    """
    try:
        open_table(url)
    except TableNotFound:
        refuse_text(url)
        return False
    except StorageError:
        return True
    except Exception as error:  # drivers of remote storage raise exceptions of their own
        raise DataError(
            f"dataset {url!r}: its storage cannot be reached: {type(error).__name__}: {error}"
        ) from error
    return True


def is_vacant(url: str) -> bool:
    """Return whether a table may come to ``url``, where ``exists`` has found none: nothing else is
    there.
    """
    fs, path = open_fs(url)
    return not list_files(fs, path)


def source_schema(schema: pa.Schema, source: Source) -> pa.Schema:
    """Return the columns that the dataloader reads: identity, origin, ``prompt``, ``answer``, all
    others as they are.

    Texts, binary values and lists have offsets of 64 bits, whatever the files have: samples of a
    prompt repeat it. Dictionaries (pandas' categories), views (polars' texts, lists) and runs are
    decoded. Index columns of dataframes are left out. What is null in every row within a list or a
    struct is a text.

    DataError when a column is missing, has a reserved name, or has a type that cannot move between
    workers.
    """
    schema = pa.schema(
        [
            field.with_type(loaded_type(field.type))
            for field in schema
            if not is_index_column(field.name)
        ]
    )
    fields = {name: TYPES[name] for name in _OWN}
    paths = {PROMPT: source.prompt, ANSWER: source.answer}
    fields |= {
        name: with_large_offsets(_column_type(schema, path, source, f"data.{name}"))
        for name, path in paths.items()
    }
    for field in schema:
        if field.name in _OWN:
            raise DataError(
                f"dataset {source.url!r} has a column {field.name!r}: rename it, that name is taken"
            )
        fields.setdefault(field.name, with_large_offsets(field.type))
    for name, kind in fields.items():
        try:
            check_types(pa.schema({name: kind}))
        except DataError as error:
            column = paths.get(name, name)
            command = f"siirl-dask data import {quote(source.url)} TABLE"
            raise DataError(
                f"dataset {source.url!r}: {error}: {command} --drop {quote(column)} makes a table "
                f"without it, and --type {quote(column)}=string one where a number is a text"
            ) from error
    return pa.schema(fields)


def _column_type(schema: pa.Schema, path: str, source: Source, key: str) -> pa.DataType:
    """Return the type of the column that ``key`` of the configuration names. DataError if there is
    none.
    """
    missing = missing_step(schema, path)
    if missing is not None:
        name, known = missing
        within = f": no {name!r}" if name != path else ""
        raise DataError(
            f"dataset {source.url!r} has no column {path!r}{within} (there is: {known})"
            f"{did_you_mean(name, known)}; {key} names it"
        )
    return type_at(schema, path)


def opened(dataset: Dataset) -> Dataset:
    """Return the dataset with its tables open, as workers get it. Errors as of ``open_source``."""
    return dataset.each(lambda source: replace(source, table=open_source(source)))


def columns_of(source: Source) -> pa.Schema:
    """Return the table's own columns. Errors as of ``open_source``."""
    return open_source(source).schema


def dataset_schema(
    dataset: Dataset, columns: Callable[[Source], pa.Schema] = columns_of
) -> pa.Schema:
    """Return the columns that the dataloader reads of ``dataset``, whose tables have ``columns``.

    Of a mixture these are the columns of all sources, and ``source_name``. Where a source has no
    such column, it is null; a column whose type differs between sources is left out. DataError for
    prompts or answers that differ in type, and for what ``source_schema`` refuses.
    """
    if isinstance(dataset, Source):
        return source_schema(columns(dataset), dataset)
    schemas = {
        share.name: source_schema(columns(share.source), share.source) for share in dataset.shares
    }
    for share in dataset.shares:
        if SOURCE_NAME in schemas[share.name].names:
            url = share.source.url
            raise DataError(
                f"dataset {url!r} has a column {SOURCE_NAME!r}: rename it, that name is taken"
            )
    fields = {name: TYPES[name] for name in _OWN}
    fields |= {name: _common_type(name, schemas) for name in (PROMPT, ANSWER)} | {
        SOURCE_NAME: TYPES[SOURCE_NAME]
    }
    for name in dict.fromkeys(name for schema in schemas.values() for name in schema.names):
        types = _types(name, schemas)
        if name not in fields and len(types) == 1:
            fields[name] = next(iter(types))
    return pa.schema(fields)


def _types(name: str, schemas: Mapping[str, pa.Schema]) -> dict[pa.DataType, str]:
    """Return each type that a column has, with the first source that has it so."""
    types: dict[pa.DataType, str] = {}
    for source, schema in schemas.items():
        if name in schema.names:
            types.setdefault(schema.field(name).type, source)
    return types


def _common_type(name: str, schemas: Mapping[str, pa.Schema]) -> pa.DataType:
    types = _types(name, schemas)
    if len(types) > 1:
        listed = ", ".join(f"{kind} in {source!r}" for kind, source in types.items())
        raise DataError(
            f"data.sources: the {name} is {listed}: expected one type; convert those that differ"
        )
    return next(iter(types))
