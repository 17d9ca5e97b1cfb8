"""Paths into a column: ``reward_model.ground_truth``, ``messages[-1].content``, ``messages[:-1]``.

A dot leads into a struct, also into each item of a list. Brackets with a number choose one item of
a list, counted from its end where it is below 0, and null where the list has no such item; with a
colon they cut a list, as Python does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from siirl_dask.errors import DataError, did_you_mean

Ints: TypeAlias = NDArray[np.int64]
Step: TypeAlias = str | int | slice
_BRACKETS = re.compile(r"\[(?:(-?\d{1,9})|(-?\d{1,9})?:(-?\d{1,9})?)\]")
_LAST_ONES = re.compile(rf"(?:{_BRACKETS.pattern})*$")


def steps_of(path: str) -> list[Step]:
    """Return the steps of a path: names, numbers and slices. DataError for brackets with
    anything else in them.
    """
    steps: list[Step] = []
    for text in path.split("."):
        last = _LAST_ONES.search(text)
        assert last is not None
        name = text[: last.start()]
        brackets = last[0]
        if not name or "[" in name or "]" in name:
            raise DataError(
                f"column {path!r}: expected a name, then [NUMBER] or [FROM:TO] where it is a list, "
                "as in messages[-1].content or messages[:-1]"
            )
        steps.append(name)
        for number, start, stop in _BRACKETS.findall(brackets):
            if number:
                steps.append(int(number))
            else:
                steps.append(slice(_end_of(start), _end_of(stop)))
    return steps


def _end_of(text: str) -> int | None:
    """Return one end of a slice as it is written; None for one that is left out."""
    if not text:
        return None
    return int(text)


def type_at(schema: pa.Schema, path: str, name: str) -> pa.DataType:
    """Return the type of the values at a path. DataError, naming the source ``name``, where
    there is no such path.
    """
    if path in schema.names:  # a name may have dots and brackets itself
        return schema.field(path).type
    kind: pa.DataType = pa.struct(list(schema))
    steps = steps_of(path)
    for step in steps:
        if not isinstance(step, str):
            if not is_list(kind):
                raise DataError(
                    f"{name!r} has no column {path!r}: what is before the brackets holds {kind}, "
                    "no list"
                )
            if isinstance(step, int):
                kind = kind.value_type
            continue
        while is_list(kind):
            kind = kind.value_type
        known = []
        if pa.types.is_struct(kind):
            known = [one.name for one in kind]
        if step not in known:
            within = ""
            if len(steps) > 1:
                within = f": no {step!r}"
            raise DataError(
                f"{name!r} has no column {path!r}{within} (there is: "
                f"{', '.join(known) or kind}){did_you_mean(step, known)}"
            )
        kind = kind.field(step).type
    return _type_behind(schema.field(str(steps[0])).type, steps[1:])


def extract(table: pa.Table, path: str) -> pa.ChunkedArray:
    """Return the values at a path of a table for which ``type_at`` gives a type."""
    if path in table.column_names:
        return table[path]
    first, *rest = steps_of(path)
    column = table[str(first)]
    return pa.chunked_array(
        [_values(chunk, rest) for chunk in column.chunks], _type_behind(column.type, rest)
    )


def is_list(kind: pa.DataType) -> bool:
    """Return whether values of a type are lists, of whatever layout."""
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _type_behind(kind: pa.DataType, steps: Sequence[Step]) -> pa.DataType:
    if not steps:
        return kind
    first = steps[0]
    rest = steps[1:]
    if isinstance(first, int):
        return _type_behind(kind.value_type, rest)
    if isinstance(first, slice):
        return _type_behind(_list_of(kind, kind.value_type), rest)
    if is_list(kind):
        return _list_of(kind, _type_behind(kind.value_type, steps))
    return _type_behind(kind.field(first).type, rest)


def _list_of(kind: pa.DataType, value: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(kind):
        return pa.large_list(value)
    return pa.list_(value)


def _values(array: pa.Array, steps: Sequence[Step]) -> pa.Array:
    if not steps:
        return array
    first = steps[0]
    rest = steps[1:]
    if isinstance(first, int):
        return _values(_item(array, first), rest)
    if isinstance(first, slice):
        return _values(_cut(array, first), rest)
    if not is_list(array.type):
        return _values(pc.struct_field(array, first), rest)
    return _with_items(array, _lengths(array), _values(array.flatten(), steps))


def _item(array: pa.Array, number: int) -> pa.Array:
    """Return item ``number`` of each list, null where a list has none."""
    lengths = _lengths(array)
    places = np.full(len(lengths), number)
    if number < 0:  # counted from the end of each list
        places = lengths + number
    absent = (places < 0) | (places >= lengths)
    begins = np.cumsum(lengths) - lengths
    return array.flatten().take(pa.array(begins + places, pa.int64(), mask=absent))


def _cut(array: pa.Array, part: slice) -> pa.Array:
    """Return the items of each list that a slice chooses; a null stays null."""
    lengths = _lengths(array)
    starts = _bound(part.start, lengths, 0)
    taken = np.maximum(_bound(part.stop, lengths, lengths) - starts, 0)
    begins = np.cumsum(lengths) - lengths + starts
    ends = np.cumsum(taken)
    within = np.arange(taken.sum()) - np.repeat(ends - taken, taken)
    places = np.repeat(begins, taken) + within
    return _with_items(array, taken, array.flatten().take(pa.array(places, pa.int64())))


def _bound(number: int | None, lengths: Ints, default: object) -> Ints:
    """Return an end of a slice in lists of these lengths, as Python takes it."""
    if number is None:
        return np.broadcast_to(np.asarray(default), lengths.shape)
    ends = np.full(len(lengths), number)
    if number < 0:  # counted from the end of each list
        ends = lengths + number
    return np.clip(ends, 0, lengths)


def _lengths(array: pa.Array) -> Ints:
    """Return the number of items of each list; 0 for a null."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
    return np.asarray(lengths.to_numpy(zero_copy_only=False))


def _with_items(array: pa.Array, lengths: Ints, items: pa.Array) -> pa.Array:
    """Return lists of these lengths with other items, null where ``array`` is."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    make = pa.ListArray
    kind = pa.int32()
    if pa.types.is_large_list(array.type):
        make = pa.LargeListArray
        kind = pa.int64()
    return make.from_arrays(pa.array(offsets, kind), items, mask=array.is_null())
