"""Finds where a value was written that a role or a node takes from a key by ``${group.key}``: the
DAG of a base is seldom what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_NAMED = re.compile(r"(role|node) '([^']*)'(?:: | )")
_WORD = re.compile(r"\w+")
_KEY = re.compile(r"\$\{(\w+\.\w+)[\w.]*\}")


@dataclass(frozen=True, slots=True)
class WrittenParts:
    """The DAG's parts as they are written, interpolations unresolved, and where keys were set."""

    roles: Mapping[str, Any] = field(default_factory=dict)
    nodes: Sequence[Any] = ()
    key_places: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    """Number of the last layer that sets a ``group.key``, and file and line there, or override; by
    key."""

    def blamed(self, message: str, values: Mapping[str, Any]) -> str:
        """Return ``message``, an error of a role's or a node's option, after the places of the keys
        that the option takes its value from. As it is where there are none. ``values`` has the
        value of each ``group.key``.
        """
        found = _NAMED.search(message)
        if found is None:
            return message
        spec = self._spec(found[1], found[2])
        keys = [
            key for key in _keys(_option(spec, message[found.end() :])) if key in self.key_places
        ]
        shown = [key for key in keys if repr(values.get(key)) in message]
        if not shown:  # the last that was written is the likeliest
            last = max((self.key_places[key][0] for key in keys), default=0)
            shown = [key for key in keys if self.key_places[key][0] == last]
        places = [self._place(key) for key in dict.fromkeys(shown)]
        return f"{', '.join(places)}, in {message}" if places else message

    def _place(self, key: str) -> str:
        place = self.key_places[key][1]
        return place if key in place else f"{place}: {key}"  # an override has the key

    def _spec(self, kind: str, name: str) -> Any:
        if kind == "role":
            return self.roles.get(name)
        for node in self.nodes:
            if isinstance(node, Mapping) and node.get("name") == name:
                return node
        return None


def _option(spec: Any, path: str) -> Any:
    """Return the written value of the option that a message is about: of ``loss: surrogate: ...``
    that of ``surrogate`` within ``loss``. None where it names no option.
    """
    value = None
    within = spec
    for part in path.split(": "):
        options = within.get("with") if isinstance(within, Mapping) else None
        word = _WORD.match(part)
        if not isinstance(options, Mapping) or word is None or word[0] not in options:
            break
        value = options[word[0]]
        within = value
    return value


def _keys(value: Any) -> Iterator[str]:
    """Yield each ``group.key`` that a value takes."""
    match value:
        case str():
            yield from _KEY.findall(value)
        case Mapping():
            for item in value.values():
                yield from _keys(item)
        case list():
            for item in value:
                yield from _keys(item)
