"""Maps the columns of a source to those of a table: paths into structs and lists, a choice of
columns, and types.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from siirl_dask.datasets.casting import cast, first_unfit
from siirl_dask.datasets.chat_messages import MESSAGES, ChatColumn, as_messages
from siirl_dask.datasets.column_paths import extract, type_at
from siirl_dask.errors import ConfigError, DataError, clause, did_you_mean
from siirl_dask.schema import IDENTITY, ORIGIN, decoded, is_index_column

_SCALARS = (
    *("string", "large_string", "binary", "large_binary", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
_SHORT = {"text": "string", "int": "int64", "float": "float64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnMapping:
    """The columns of a table, given those of a source: all of them, and new ones; less what is
    dropped.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    """New columns by name, each with its path in the source: see column_paths.py."""
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    """Types of columns by name; others keep theirs."""
    select: Sequence[str] | None = None
    """Names of all columns of the table, in its order; None takes all but dataframes' indices."""
    drop: Sequence[str] = ()
    """Names of columns that the table does not have."""
    chat: ChatColumn | None = None
    """A further column, of messages."""

    def schema(self, source: pa.Schema, name: str) -> pa.Schema:
        """Return the table's schema for that of a source called ``name``.

        DataError for a column that is not there, two of one name, or a name that training needs for
        itself.
        """
        twice = sorted({column for column in source.names if source.names.count(column) > 1})
        if twice:
            raise DataError(f"{name!r} has more than one column {twice[0]!r}")
        paths = self._paths(source, name)
        kinds = {
            column: self._type_of(column, type_at(source, path, name), name)
            for column, path in paths.items()
        }
        if self.chat is not None and self.chat.name in kinds:
            kinds[self.chat.name] = self._messages_of(self.chat, source, name)
        if reserved := [column for column in kinds if column in (*IDENTITY, *ORIGIN)]:
            raise DataError(
                f"{name!r}: the column {reserved[0]!r} has a name that training needs for itself: "
                "give it another, "
                f"with --column OTHER={reserved[0]} --drop {reserved[0]}, or drop it"
            )
        if unknown := [column for column in self.types if column not in kinds]:
            raise DataError(f"--type {unknown[0]}=...: {_no_column(unknown[0], kinds, name)}")
        return pa.schema(kinds)

    def apply(self, table: pa.Table, schema: pa.Schema, name: str, before: int = 0) -> pa.Table:
        """Return a table's columns under the names and in the types of ``schema``. DataError for a
        value that does not fit, with its row: ``before`` rows of the source come before these.
        """
        paths = self._paths(table.schema, name)
        columns = []
        for one in schema:
            column = extract(table, paths[one.name])
            if self.chat is not None and one.name == self.chat.name:
                columns.append(as_messages(column, self.chat.system))
                continue
            try:
                columns.append(cast(column, one.type))
            except (pa.ArrowException, ValueError, OverflowError) as error:
                row = before + first_unfit(column, one.type) + 1
                raise DataError(
                    f"{name!r}: column {one.name!r} holds {_name_of(column.type)}, and its value "
                    f"in row {row} is no {_name_of(one.type)}: {error!s:.300}"
                ) from error
        return pa.table(columns, schema=schema)

    def _messages_of(self, chat: ChatColumn, source: pa.Schema, name: str) -> pa.DataType:
        texts = type_at(source, chat.path, name)
        if not (pa.types.is_string(texts) or pa.types.is_large_string(texts)):
            raise DataError(f"{name!r}: --chat {chat.path} makes messages of texts, not of {texts}")
        if chat.name in self.types:
            raise DataError(f"--type {chat.name}=...: --chat {chat.path} makes messages of it")
        return MESSAGES

    def _type_of(self, column: str, there: pa.DataType, name: str) -> pa.DataType:
        try:
            stored = decoded(there, storable)
        except ValueError as error:
            raise DataError(
                f"{name!r}: column {column!r} is {there}: {clause(error)}; --drop {column}"
            ) from error
        return self.types.get(column, stored)

    def _paths(self, source: pa.Schema, name: str) -> dict[str, str]:
        """Return the path in the source of each column of the table."""
        paths = {column: column for column in source.names} | dict(self.columns)
        if self.chat is not None:
            paths[self.chat.name] = self.chat.path
        for option, wanted in (("--select", self.select or ()), ("--drop", self.drop)):
            if unknown := [column for column in wanted if column not in paths]:
                raise DataError(f"{option} {unknown[0]}: {_no_column(unknown[0], paths, name)}")
        if self.select is None:
            chosen = [column for column in paths if not is_index_column(column)]
        else:
            chosen = list(self.select)
        return {column: paths[column] for column in chosen if column not in self.drop}


def parse_type(text: str) -> pa.DataType:
    """Return the Arrow type that ``int``, ``int64`` or ``list<string>`` names. ConfigError for
    another text.
    """
    inner = re.fullmatch(r"\s*list\s*<(.*)>\s*", text)
    if inner:
        return pa.list_(parse_type(inner[1]))
    known = (*_SHORT, *_SCALARS)
    name = text.strip()
    if name not in known:
        raise ConfigError(
            f"type {text!r}: expected list<...> or one of "
            f"{', '.join(known)}{did_you_mean(name, known)}"
        )
    return pa.type_for_alias(_SHORT.get(name, name))


def _name_of(kind: pa.DataType) -> str:
    """Return the name by which users give a type; Arrow's, which calls float64 double and
    float32 float, for others.
    """
    if pa.types.is_list(kind):
        return f"list<{_name_of(kind.value_type)}>"
    if pa.types.is_float64(kind):
        return "float"
    known = [name for name in _SCALARS if pa.type_for_alias(name) == kind]
    if known:
        return known[0]
    return str(kind)


def unify(schemas: Iterable[tuple[str, pa.Schema]]) -> pa.Schema:
    """Return the schema that all, given with their names, fit into: wider numbers of a kind, any
    type instead of nulls.

    DataError names the two that do not go together, and the column.
    """
    (first, schema), *others = schemas
    for name, other in others:
        missing = sorted(set(schema.names) ^ set(other.names))
        if missing:
            having = name
            lacking = first
            if missing[0] in schema.names:
                having = first
                lacking = name
            raise DataError(
                f"{lacking!r} lacks the column {missing[0]!r} that {having!r} has: choose columns "
                "that all have, with --select or --drop, or name them alike, with --column"
            )
        for one in other:
            here = schema.field(one.name)
            both = common_type(here.type, one.type)
            if both is None:
                raise DataError(
                    f"column {one.name!r} is {_name_of(here.type)} in {first!r} and "
                    f"{_name_of(one.type)} in {name!r}: "
                    f"give it a type, as in --type {one.name}=string"
                )
            schema = schema.set(schema.get_field_index(one.name), here.with_type(both))
    return schema


def common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return a type for the values of both, each written as before: wider numbers of a kind, structs
    with the fields of both, any type instead of nulls. None where there is none.
    """
    if _would_change(one, other):
        return None
    schemas = [pa.schema({"values": kind}) for kind in (one, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _would_change(one: pa.DataType, other: pa.DataType) -> bool:
    """Return whether Arrow's type for both writes a value otherwise: 5 as 5.0, a text as bytes."""
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        shared = {field.name for field in one} & {field.name for field in other}
        return any(_would_change(one.field(name).type, other.field(name).type) for name in shared)
    if one.num_fields and one.num_fields == other.num_fields:
        return any(
            _would_change(one.field(number).type, other.field(number).type)
            for number in range(one.num_fields)
        )
    written = _written_as(one)
    if not written or not _written_as(other):
        return False
    return written != _written_as(other)


def _written_as(kind: pa.DataType) -> str:
    """Return a word for how values of a type are written; "" for types that only go with their own
    kind.
    """
    types = pa.types
    if types.is_integer(kind):
        return "digits"
    if types.is_floating(kind):
        return "digits with a point"
    if types.is_decimal(kind):
        return f"{kind.scale} digits behind a point"
    if types.is_string(kind) or types.is_large_string(kind):
        return "text"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "bytes"
    return ""


def _no_column(column: str, known: Iterable[str], name: str) -> str:
    return (
        f"{name!r} has no column {column!r} (there is: "
        f"{', '.join(known)}){did_you_mean(column, known)}"
    )


def storable(kind: pa.DataType) -> pa.DataType:
    """Return the type in which Parquet has the same values: it has no times in seconds.

    ValueError for a type that it cannot hold.
    """
    if pa.types.is_union(kind) or pa.types.is_interval(kind):
        raise ValueError("no table has this type")
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        return pa.timestamp("ms", kind.tz)
    if pa.types.is_time32(kind):
        return pa.time32("ms")
    if pa.types.is_date64(kind):
        return pa.date32()
    return kind
