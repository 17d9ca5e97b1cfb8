"""Comparison of schemas. Names and types must agree; order, nullability and metadata may differ."""

from __future__ import annotations

import pyarrow as pa

from siirl_storage.errors import StorageError


def check_schema(schema: pa.Schema, where: str) -> None:
    """Raise StorageError if ``schema`` has no column, or two of one name: columns are found by
    name.
    """
    if not schema.names:
        raise StorageError(f"{where}: no columns")
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise StorageError(f"{where}: more than one column is called {', '.join(map(repr, twice))}")


def difference(expected: pa.Schema, got: pa.Schema) -> str:
    """Return, in words, why ``got`` cannot be read as ``expected``; an empty text if it can.

    A column of type ``null`` goes for any type: it is what other writers infer from a partition
    without values.
    """
    problems = [f"lacks column {name!r}" for name in expected.names if name not in got.names]
    problems += [
        f"has a column {name!r} that the table has not"
        for name in got.names
        if name not in expected.names
    ]
    for field in expected:
        if field.name in got.names:
            kind = got.field(field.name).type
            if kind != field.type and not pa.types.is_null(kind):
                problems.append(f"has column {field.name!r} as {kind}, not {field.type}")
    return "; ".join(problems)


def conform(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """Return ``table`` with exactly the fields of ``schema``, in its order. StorageError that
    names the difference.
    """
    if table.schema.equals(schema, check_metadata=True):
        return table
    differs = difference(schema, table.schema)
    if differs:
        raise StorageError(f"{where} {differs}")
    try:
        return with_fields(table, schema)
    except (
        pa.ArrowException,
        ValueError,
    ) as error:  # a plain ValueError for a null where none may be
        raise StorageError(f"{where} does not fit the table's schema: {error}") from error


def with_fields(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of ``schema``, in its order, with its types. ArrowInvalid for values that do
    not fit, ValueError for a null where none may be.

    A column that has its type already stays as it is: Arrow's own cast fails for nulls in lists,
    such as those of a key that is null in all chat messages (pyarrow 26).
    """
    columns = []
    for field in schema:
        column = table[field.name]
        if column.null_count and not field.nullable:
            raise ValueError(f"column {field.name!r} has nulls, and may have none")
        if column.type != field.type:
            column = column.cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=schema)
