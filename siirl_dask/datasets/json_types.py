"""Decides the types of JSON values such that each comes back as it was written, and makes Arrow
arrays of them.

A value's type is that of all values at its place: whole numbers within 64 bits are int64, numbers
that a float64 prints as they are written are float64, and what is of several kinds, or would be
another number, is text as it is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, count
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_MOST_KEYS = 1000  # of objects at one place; where there are more, keys are data
_MOST_PLACES = 10_000  # of keys and lists in all
_DEEPEST = 60  # objects and lists in each other
_PLAIN_FROM = 1e-4  # numbers that Python and Arrow print without an exponent
_PLAIN_TO = 1e14
_CONTENT = "content"
_PART = {"type": "text", "text": ""}
"""A part of a message's content that is a text."""
_NONE = type(None)
_TEXTS = {str, bytes, _NONE}
_KINDS = {
    str: "texts",
    bool: "truth values",
    int: "whole numbers",
    bytes: "numbers with a fraction",
    dict: "objects",
    list: "lists",
}
_ORDER = list(_KINDS)
Values = Sequence[Any]


class JsonShape:
    """Kinds of the values at one place of all rows."""

    def __init__(self, depth: int = 0, places: Iterator[int] | None = None, name: str = "") -> None:
        self._depth = depth
        self._name = name
        if places is None:
            places = count()
        self._places = places  # of all shapes below the first
        self._kinds: dict[type, None] = {}  # in the order in which they were seen
        self._fields: dict[str, JsonShape] = {}
        self._item: JsonShape | None = None
        # the first number that would not come back as it is written
        self._inexact: str | None = None

    def look(self, values: Values) -> None:
        """Take note of values. ValueError for those that no column can hold."""
        kinds = set(map(type, values))
        for kind in sorted(kinds - {_NONE}, key=_ORDER.index):
            self._kinds.setdefault(kind)
            if kind is str or kind is bool:
                continue
            same = values
            if len(kinds) > 1:
                same = [value for value in values if type(value) is kind]
            if kind is dict:
                self._look_at_objects(same)
            elif kind is list:
                self._below().look(list(chain.from_iterable(same)))
            elif self._inexact is not None:
                continue
            elif kind is int:
                self._inexact = _beyond_64_bits(same)
            else:
                self._inexact = _first_changed(same)

    def _look_at_objects(self, values: Values) -> None:
        for name in dict.fromkeys(chain.from_iterable(values)):
            if name not in self._fields:
                if self._has_data_as_keys:
                    return
                name.encode()  # UnicodeEncodeError, a ValueError, for half of a surrogate pair
                self._fields[name] = self._deeper(name)
            self._fields[name].look(_items_there(values, name))

    def _below(self) -> JsonShape:
        if self._item is None:
            self._item = self._deeper()
        return self._item

    def _deeper(self, name: str = "") -> JsonShape:
        if self._depth == _DEEPEST:
            raise ValueError(f"its values are nested more than {_DEEPEST} deep")
        if next(self._places) >= _MOST_PLACES:
            raise ValueError(
                f"all rows up to it have more than {_MOST_PLACES} different keys: these are data"
            )
        return JsonShape(self._depth + 1, self._places, name)

    @property
    def _has_data_as_keys(self) -> bool:
        if self._depth <= 0:
            return False
        return len(self._fields) >= _MOST_KEYS

    @property
    def _holds_parts_and_texts(self) -> bool:
        """Whether it is the content of chat messages, of which some have texts and others lists of
        parts: a text is a list of one part then, as it is to chat templates.
        """
        if self._name != _CONTENT or self._kinds.keys() != {str, list}:
            return False
        item = self._below()
        if item._kinds.keys() != {dict}:
            return False
        return _PART.keys() <= item._fields.keys()

    @property
    def type(self) -> pa.DataType:
        """Type that holds all values as they are; text where there is none but nulls."""
        if self._holds_parts_and_texts:
            return pa.list_(self._below().type)
        if len(self._kinds) != 1 or self._reason() is not None:
            return pa.string()
        (kind,) = self._kinds
        if kind is dict:
            return pa.struct([(name, field.type) for name, field in self._fields.items()])
        if kind is list:
            return pa.list_(self._below().type)
        return {str: pa.string(), bool: pa.bool_(), int: pa.int64(), bytes: pa.float64()}[kind]

    def exact_type(self) -> pa.DataType | None:
        """Return the type, if all values are texts, truth values or whole numbers, of one kind at
        each place and not only nulls there, or objects and lists of such; None if they are not.
        """
        if len(self._kinds) != 1 or bytes in self._kinds or self._reason() is not None:
            return None
        if dict in self._kinds:
            fields = [(name, field.exact_type()) for name, field in self._fields.items()]
            if any(kind is None for _, kind in fields):
                return None
            return pa.struct(fields)
        if list in self._kinds:
            item = self._below().exact_type()
            if item is None:
                return None
            return pa.list_(item)
        return self.type

    @property
    def names(self) -> list[str]:
        """Keys of all objects, in the order in which they were seen."""
        return list(self._fields)

    def fields(self) -> list[pa.Field]:
        """Return a column for each key."""
        return [pa.field(name, field.type) for name, field in self._fields.items()]

    def remarks(self, path: str = "") -> Iterator[str]:
        """Yield what is text although it was written otherwise, with the path of each place."""
        if self._holds_parts_and_texts:
            yield f"{path} holds texts and lists of parts: a text is a list of one part"
            yield from self._below().remarks(f"{path}[]")
            return
        reason = self._reason()
        if path and reason is not None:
            yield f"{path} holds {reason}: text, as it is written"
            return
        for name, field in self._fields.items():
            yield from field.remarks(f"{path}.{name}" if path else name)
        if self._item is not None:
            yield from self._item.remarks(f"{path}[]")

    def _reason(self) -> str | None:
        """Return why values that are not texts become texts; None where they do not."""
        if len(self._kinds) > 1:
            return " and ".join(_KINDS[kind] for kind in self._kinds)
        if self._inexact is not None:
            return f"{self._inexact:.60}, which a number in the table would change"
        if dict in self._kinds and not self._fields:
            return "objects without keys"
        if self._has_data_as_keys:
            return f"objects of {_MOST_KEYS} different keys or more"
        return None


def _items_there(values: Values, name: str) -> list[Any]:
    """Return what objects have under a name, of those that have it."""
    try:
        return list(map(itemgetter(name), values))
    except KeyError:
        return [value[name] for value in values if name in value]


def _beyond_64_bits(numbers: Sequence[int]) -> str | None:
    if min(numbers) >= -(2**63) and max(numbers) < 2**63:
        return None
    return str(next(number for number in numbers if not -(2**63) <= number < 2**63))


def _first_changed(numbers: Sequence[bytes]) -> str | None:
    """Return the first number that a float64 does not print as it is written."""
    written = pa.array(numbers, pa.string())
    values = written.cast(pa.float64())
    size = pc.abs(values)
    # Arrow prints these as Python does, and much faster
    plain = pc.and_(pc.greater_equal(size, _PLAIN_FROM), pc.less(size, _PLAIN_TO))
    same = pc.and_(pc.equal(values.cast(pa.string()), written), plain)
    others = written.filter(pc.invert(same)).unique().to_pylist()
    return next((text for text in others if float_text(float(text)) != text), None)


def float_text(number: float) -> str:
    """Return a number as JSON has it, in the fewest digits that tell it from all others."""
    return json.dumps(number)


def array_of(values: Values, kind: pa.DataType) -> pa.Array:
    """Return values in the type of a shape that has seen them. UnicodeEncodeError for half of a
    surrogate pair.
    """
    if pa.types.is_string(kind):
        if set(map(type, values)) <= _TEXTS:
            return pa.array(values, kind)
        return pa.array([None if value is None else as_text(value) for value in values], kind)
    if pa.types.is_struct(kind):
        objects, absent = _present(values, {})
        arrays = [array_of(_items_or_none(objects, one.name), one.type) for one in kind]
        return pa.StructArray.from_arrays(arrays, fields=list(kind), mask=absent)
    if pa.types.is_list(kind):
        if str in set(map(type, values)):
            values = [[_PART | {"text": one}] if isinstance(one, str) else one for one in values]
        lists, absent = _present(values, [])
        ends = pa.array([0, *accumulate(map(len, lists))], pa.int32())
        items = array_of(list(chain.from_iterable(lists)), kind.value_type)
        return pa.ListArray.from_arrays(ends, items, type=kind, mask=absent)
    if pa.types.is_floating(kind):
        return pa.array(values, pa.string()).cast(kind)  # from the digits that are written
    return pa.array(values, kind)


def _present(values: Values, empty: Any) -> tuple[Values, pa.Array | None]:
    """Return values with ``empty`` for None, and where that is; no mask where there is no None."""
    if _NONE not in set(map(type, values)):
        return values, None
    absent = pa.array([value is None for value in values], pa.bool_())
    return [empty if value is None else value for value in values], absent


def _items_or_none(objects: Values, name: str) -> list[Any]:
    try:
        return list(map(itemgetter(name), objects))
    except KeyError:
        return [value.get(name) for value in objects]


def as_text(value: Any) -> str:
    """Return a value as text: texts and numbers as they are, others as JSON."""
    if isinstance(value, str):
        return value
    return _json(value)


def _json(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_json(name)}: {_json(item)}" for name, item in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
