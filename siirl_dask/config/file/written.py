"""Keeps what a YAML text says where YAML reads another value: ``007`` is 7 to it, ``1.10`` is 1.1,
``12:30`` is 750 and ``010`` is 8.

A key whose value is a text gets the text that is written. A number of which the digits are not its
own is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

import yaml

from siirl_dask.coerce import field_types
from siirl_dask.errors import ConfigError

# libyaml's, ten times as fast, where it is built in
LOADER: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# octal, and of base 60
_OTHER_NUMBER = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")


def as_written(value: Any, node: yaml.Node | None, hint: Any, key: str = "") -> Any:
    """Return plain data that YAML made of ``node``, with texts as they are written where ``hint``,
    a dataclass or a field's annotation, has texts.

    ConfigError, with the key below ``key``, for a number that YAML reads otherwise than it looks.
    """
    kind = _own(hint)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(value, node, kind, key)
    if isinstance(node, yaml.MappingNode) and isinstance(value, dict):
        nodes = {str(name.value): item for name, item in node.value}
        return {
            name: as_written(
                item, nodes.get(str(name)), hint_below(kind, str(name)), _joined(key, str(name))
            )
            for name, item in value.items()
        }
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list):
        below = _item_of(kind)
        return [
            as_written(item, own, below, f"{key}[{place}]")
            for place, (item, own) in enumerate(zip(value, node.value, strict=True))
        ]
    return value


def hint_below(hint: Any, name: str) -> Any:
    """Return the annotation of what is called ``name`` in a value of annotation ``hint``; None where
    it says nothing.
    """
    kind = _own(hint)
    if is_dataclass(kind):
        return field_types(cast("type[Any]", kind)).get(name)
    if _is_kind(kind, Mapping):
        return _item_of(kind)
    return None


def is_text(hint: Any) -> bool:
    """Return whether values of an annotation are texts, or null."""
    return _own(hint) is str


def _scalar(value: Any, node: yaml.ScalarNode, kind: Any, key: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if kind is str:
        return node.value
    if kind in (int, float) and _OTHER_NUMBER.fullmatch(node.value):
        raise ConfigError(
            f"{key}={node.value}: YAML reads the number {value!r} there, in base 8 or 60: expected "
            "decimal digits without a 0 before them"
        )
    return value


def _own(hint: Any) -> Any:
    """Return an annotation without ``| None``."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    if len(kinds) == 1:
        return kinds[0]
    return None


def _item_of(kind: Any) -> Any:
    """Return the annotation of a container's values; None where there is none."""
    arguments = get_args(kind)
    if _is_kind(kind, Mapping) and len(arguments) == 2:
        return arguments[1]
    if _is_kind(kind, Sequence) and arguments:
        return arguments[0]
    return None


def _is_kind(kind: Any, container: type) -> bool:
    origin = get_origin(kind)
    if not isinstance(origin, type):
        return False
    return issubclass(origin, container)


def _joined(key: str, name: str) -> str:
    if key:
        return f"{key}.{name}"
    return name
