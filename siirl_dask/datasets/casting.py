"""Gives columns the types that a user asks for. A value that would be another one is refused,
with its row.
"""

from __future__ import annotations

from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

from siirl_dask.datasets.json_types import float_text
from siirl_dask.schema import decoded
from siirl_dask.tables import decode_array, needs_decoding

_WHOLE = r"^[+-]?[0-9]+$"
_ENDLESS = r"(?i)^[+-]?(inf|infinity)$"
_ZERO = r"^[+-]?[0.]+([eE].*)?$"


def cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Return a column in another type.

    Texts become numbers only as these are written: a whole number for an integer, in decimal
    digits. A fraction becomes the nearest float, and a float the text with the fewest digits that
    tell it from others. Raises ArrowInvalid or ValueError for a value that does not fit: a text
    that is no number, a number beyond the range of the type, a whole number that a float would
    change.
    """
    return pa.chunked_array([_cast(chunk, kind) for chunk in column.chunks], kind)


def first_unfit(column: pa.ChunkedArray, kind: pa.DataType) -> int:
    """Return the index of the first value that ``cast`` refuses, in a column of which it refuses
    one.
    """
    low = 0
    high = len(column)  # the first is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            cast(column.slice(low, middle - low), kind)
        except (pa.ArrowException, ValueError):
            high = middle
        else:
            low = middle
    return low


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    if array.type == kind:
        return array
    if needs_decoding(array.type):
        return _cast(decode_array(array, decoded(array.type)), kind)
    if pa.types.is_dictionary(array.type):
        return _cast(array.dictionary_decode(), kind)
    types = pa.types
    if types.is_struct(array.type) and types.is_struct(kind) and _names(array.type) <= _names(kind):
        return _struct(array, kind)
    if (types.is_list(array.type) or types.is_large_list(array.type)) and types.is_list(kind):
        items = _cast(array.flatten(), kind.value_type)
        lengths = pc.fill_null(pc.list_value_length(array), 0).cast(pa.int64())
        ends = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(lengths)]).cast(
            pa.int32()
        )
        return pa.ListArray.from_arrays(ends, items, type=kind, mask=array.is_null())
    if _is_text(array.type) and types.is_integer(kind):
        return _whole(array, kind)
    if _is_text(kind) and types.is_floating(array.type):
        texts = [None if number is None else float_text(number) for number in array.to_pylist()]
        return pa.array(texts, kind)
    made = array.cast(kind)
    if types.is_floating(kind):
        _check_floats(array, made)
    if types.is_boolean(kind) and _is_number(array.type):
        _refuse(array, pc.not_equal(made.cast(array.type), array), "is neither 0 nor 1")
    return made


def _struct(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return structs in a type with all their fields, null where they have none."""
    fields = []
    for field in kind:
        if field.name in _names(array.type):
            fields.append(_cast(pc.struct_field(array, field.name), field.type))
        else:
            fields.append(pa.nulls(len(array), field.type))
    return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())


def _names(kind: pa.DataType) -> set[str]:
    return {field.name for field in kind}


def _whole(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the integers that texts are, without the hexadecimal ones that Arrow takes."""
    other = texts.filter(pc.invert(pc.match_substring_regex(texts, _WHOLE)))
    if len(other):
        raise ValueError(f"{other[0].as_py()!r:.100} is no whole number")
    return pc.replace_substring_regex(texts, r"^\+", "").cast(kind)


def _check_floats(array: pa.Array, made: pa.Array) -> None:
    """Raise ValueError for a number that became infinite or zero, or a whole one that became
    another.
    """
    numbers = made.cast(pa.float64())
    if _is_number(array.type):
        before = array.cast(pa.float64(), safe=False)
        _refuse(array, pc.and_(pc.is_inf(numbers), pc.invert(pc.is_inf(before))))
        whole = pc.equal(pc.floor(before), before)
        _refuse(array, pc.and_(whole, pc.not_equal(numbers, before)), "would become another")
        return
    if pa.types.is_decimal(array.type):
        pairs = zip(array.to_pylist(), made.to_pylist(), strict=True)
        _refuse(
            array,
            pa.array([_changes(one, other) for one, other in pairs], pa.bool_()),
            "would become another",
        )
        return
    if not _is_text(array.type):
        return
    _refuse(
        array, pc.and_(pc.is_inf(numbers), pc.invert(pc.match_substring_regex(array, _ENDLESS)))
    )
    _refuse(
        array, pc.and_(pc.equal(numbers, 0.0), pc.invert(pc.match_substring_regex(array, _ZERO)))
    )
    whole = pc.match_substring_regex(array, _WHOLE)
    texts = array.filter(whole).to_pylist()
    for text, number in zip(texts, made.filter(whole).to_pylist(), strict=True):
        if text is not None and int(text) != int(number):
            raise ValueError(f"{text!r:.100} would become {int(number)}")


def _changes(number: Decimal | None, made: float | None) -> bool:
    """Return whether a whole number became another."""
    if number is None or made is None or number != number.to_integral_value():
        return False
    return number != Decimal(made)


def _refuse(array: pa.Array, unfit: pa.Array, reason: str = "is out of its range") -> None:
    found = array.filter(unfit)
    if len(found):
        raise ValueError(f"{found[0].as_py()!r:.100} {reason}")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
