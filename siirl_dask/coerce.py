"""Converts plain values, as YAML gives them, to the type of an annotation: for config fields and options of nodes.

    int, float, bool, str     a number may come as text (an environment variable), a whole number, of 64 bits, as 1e3
    an Enum, a Literal        one of its values
    a dataclass               a mapping of its fields
    list, tuple, dict, ...    each item by its own annotation
    X | None                  null, or X
    a callable                ``module:function`` or ``{run: module:function, with: {option: value}}``

The caller chooses the exception for a wrong value, and the way to find a function by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from siirl_dask.errors import UserError, did_you_mean

Bind = Callable[[str, Any, str], Callable[..., Any]]
"""``(name, options, where) -> function``: the function called ``name`` with ``options`` bound."""
field_types: Callable[[Any], dict[str, Any]] = cache(get_type_hints)
"""``get_type_hints`` of a dataclass, which evaluates the text of each annotation; it is asked
for with every value."""
_LARGEST = 2**63 - 1
"""Largest whole number that tables and records hold."""
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
_CALL = ("run", "with")


@dataclass(frozen=True, slots=True)
class Coercer:
    """Converts values. A value that cannot be converted raises ``error``, which names it and
    what was expected.
    """

    error: type[UserError]
    bind: Bind | None = None
    """Function that finds a function by name and binds options. None: names stay texts."""

    def __call__(self, value: Any, hint: Any, where: str) -> Any:
        """Return ``value`` converted to the annotation ``hint``; errors name it ``where``
        (``run.yaml: rollout.n``).
        """
        if get_origin(hint) in (Union, UnionType):
            if value is None or (type(None) in get_args(hint) and _names_nothing(value)):
                return None
            hint = next(choice for choice in get_args(hint) if choice is not type(None))
        if self.bind is not None and (_is_callable(hint) or _is_call(value)):
            return self._function(value, hint, where)
        if get_origin(hint) is Literal:
            return self._choice(value, {choice: choice for choice in get_args(hint)}, where)
        if isinstance(hint, type):
            if is_dataclass(hint) and not isinstance(value, hint):
                return self._dataclass(value, hint, where)
            if issubclass(hint, Enum):
                return self._choice(value, {member.value: member for member in hint}, where)
            if hint in _EXPECTED:
                return self._scalar(value, hint, where)
        return self._items(value, hint, where)

    def known_keys(self, value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
        """Refuse a mapping with a key that is none of ``known``."""
        for key in value:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise self.error(f"{where} has an unknown key {key!r} (keys: {list(known)}){hint}")

    def _function(self, value: Any, hint: Any, where: str) -> Any:
        assert self.bind is not None
        if isinstance(value, str):
            return self.bind(value, None, where)
        if isinstance(value, Mapping):
            self.known_keys(value, _CALL, where)
            return self.bind(value.get("run", ""), value.get("with"), where)
        if callable(value):
            return value
        raise self.error(
            f"{where}={value!r}: expected a function, 'module:function' or {{run: ..., with: "
            f"{{...}}}}"
        )

    def _dataclass(self, value: Any, kind: type, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise self.error(
                f"{where}={value!r}: expected a mapping with keys of "
                f"{[f.name for f in fields(kind)]}"
            )
        known = {field.name: field for field in fields(kind)}
        self.known_keys(value, list(known), where)
        required = (
            f.name for f in known.values() if f.default is MISSING and f.default_factory is MISSING
        )
        missing = [name for name in required if name not in value]
        if missing:
            raise self.error(f"{where} lacks {missing}, which {kind.__name__} needs")
        hints = field_types(kind)
        return kind(
            **{key: self(item, hints[key], f"{where}.{key}") for key, item in value.items()}
        )

    def _choice(self, value: Any, choices: Mapping[Any, Any], where: str) -> Any:
        if isinstance(value, (list, dict)) or value not in choices:
            near = did_you_mean(str(value), map(str, choices))
            raise self.error(f"{where}={value!r}: expected one of {list(choices)}{near}")
        return choices[value]

    def _scalar(self, value: Any, kind: type[Any], where: str) -> Any:
        try:
            if kind is bool or value is None or isinstance(value, (bool, list, dict)):
                if kind is bool and isinstance(value, bool):
                    return value
            elif kind is not int or not isinstance(value, float) or value.is_integer():
                converted = kind(value)
                if kind is not int or -_LARGEST <= converted <= _LARGEST:
                    return converted
        except (ValueError, OverflowError):
            pass
        raise self.error(f"{where}={value!r}: expected {_EXPECTED[kind]} ({kind.__name__})")

    def _items(self, value: Any, hint: Any, where: str) -> Any:
        """Convert lists and mappings item by item; a value whose annotation cannot be checked
        stays as it is.
        """
        kind = hint if get_origin(hint) is None else get_origin(hint)
        arguments = get_args(hint)
        if _is_kind(kind, Mapping) and not isinstance(value, Mapping):
            raise self.error(f"{where}={value!r}: expected a mapping")
        listed = _is_list(value)
        if _is_kind(kind, Sequence):
            length = (
                len(arguments)
                if kind is tuple and arguments and arguments[-1] is not Ellipsis
                else None
            )
            if not listed or (length is not None and len(value) != length):
                count = "any number of" if length is None else length
                raise self.error(
                    f"{where}={value!r}: expected a list of {count} values, as in [0, 1]"
                )
        if isinstance(value, Mapping):
            item_hint = arguments[1] if _is_kind(kind, Mapping) and arguments else Any
            return {key: self(item, item_hint, f"{where}.{key}") for key, item in value.items()}
        if not listed:
            return value
        hints = [item for item in arguments if item is not Ellipsis]
        if not hints:
            hints = [Any]
        items = [
            self(item, hints[min(at, len(hints) - 1)], f"{where}[{at}]")
            for at, item in enumerate(value)
        ]
        return tuple(items) if kind is tuple else items


def _is_kind(hint: Any, kind: type) -> bool:
    """Tell whether an annotation's class is a container of ``kind``; a text is no sequence of
    values.
    """
    if not isinstance(hint, type) or issubclass(hint, (str, bytes)):
        return False
    return issubclass(hint, kind)


def _is_list(value: Any) -> bool:
    if isinstance(value, (str, bytes)):
        return False
    return isinstance(value, Sequence)


def _is_callable(hint: Any) -> bool:
    if hint is Callable or get_origin(hint) is get_origin(Callable[..., Any]):
        return True
    if not getattr(hint, "_is_protocol", False):
        return False
    return "__call__" in vars(hint)


def _is_call(value: Any) -> bool:
    """Tell whether a mapping spells a function with options: ``{run: ..., with: {...}}``."""
    if not isinstance(value, Mapping):
        return False
    return value.keys() == set(_CALL)


def _names_nothing(value: Any) -> bool:
    if not _is_call(value) or value["run"]:
        return False
    return not value["with"]
