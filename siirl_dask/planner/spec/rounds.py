"""Writes out nodes that a DAG in YAML gives once for several rounds.

    - name: debate
      after: hand_over_b                     # the node before the first round
      repeat:
        times: 3
        nodes:
          - {name: "prompts_{round}", run: ..., role: rollout_a, after: "{previous}"}
          - {name: "rollout_{round}", run: ..., role: rollout_a, after: "prompts_{round}"}
    - {name: reward, run: ..., role: reward, after: debate}

``{round}`` is the number of the round, from 1, and ``{previous}`` the last node of the round
before; in the first round it is the node that the entry comes ``after``. A node that comes after
the entry comes after the last one of all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from siirl_dask.errors import PlanError, did_you_mean

_KEYS = ("name", "after", "repeat")
_REPEAT_KEYS = ("times", "nodes")
_WORDS = ("round", "previous")
_WORD = re.compile(r"\{(\w+)\}")


def written_out(nodes: Sequence[Any], places: Sequence[str] = ()) -> tuple[list[Any], list[str]]:
    """Return the specs of all nodes, round after round, and the place of each; what is no
    ``repeat`` stays as it is.

    PlanError, which names the entry, for one of another form.
    """
    specs: list[Any] = []
    origins: list[str] = []
    ends: dict[str, str] = {}
    for position, (spec, place) in enumerate(zip_longest(nodes, places, fillvalue="")):
        spec = _after(spec, ends)
        own = [spec]
        if isinstance(spec, Mapping) and "repeat" in spec:
            label = ""
            if place:
                label = f"{place}: "
            own = _rounds(spec, f"{label}repeat {spec.get('name', position)!r}")
            if "name" in spec:
                ends[str(spec["name"])] = own[-1]["name"]
        specs += own
        origins += [place] * len(own)
    return specs, origins if places else []


def _after(spec: Any, ends: Mapping[str, str]) -> Any:
    """Return a node's spec with the last node of a ``repeat`` in place of the name of that."""
    if not isinstance(spec, Mapping) or not spec.get("after"):
        return spec
    after = spec["after"]
    if isinstance(after, str):
        return {**spec, "after": ends.get(after, after)}
    if isinstance(after, (list, tuple)):
        return {
            **spec,
            "after": [ends.get(name, name) if isinstance(name, str) else name for name in after],
        }
    return spec  # a mistake, which is refused with the node


def _rounds(spec: Mapping[str, Any], label: str) -> list[dict[str, Any]]:
    _check_keys(spec, _KEYS, label)
    repeat = spec["repeat"]
    if not isinstance(repeat, Mapping):
        raise PlanError(f"{label} is {repeat!r}: expected {{times: 3, nodes: [...]}}")
    _check_keys(repeat, _REPEAT_KEYS, label)
    times = repeat.get("times")
    nodes = repeat.get("nodes")
    if type(times) is not int or times < 1:
        raise PlanError(
            f"{label} has times={times!r}: expected a whole number of rounds, at least 1"
        )
    if not isinstance(nodes, list) or not nodes:
        raise PlanError(f"{label} has nodes={nodes!r}: expected a list of at least one node")
    previous = spec.get("after")
    if previous is not None and not isinstance(previous, str):
        raise PlanError(f"{label} has after={previous!r}: expected the name of one node, or none")
    made: list[dict[str, Any]] = []
    for number in range(1, times + 1):
        for node in nodes:
            if (
                not isinstance(node, Mapping)
                or "repeat" in node
                or not isinstance(node.get("name"), str)
            ):
                raise PlanError(
                    f"{label} repeats {node!r:.200}: expected a node with a name, no repeat within "
                    "it"
                )
            made.append(_filled(node, number, previous, label))
        previous = made[-1]["name"]
    names = [node["name"] for node in made]
    for name in names:
        if names.count(name) > 1:
            raise PlanError(
                f"{label} makes {name!r} in every round: expected {{round}} in the name, as in "
                f"'node_{{round}}'"
            )
    return made


def _check_keys(value: Mapping[str, Any], known: Sequence[str], label: str) -> None:
    for key in value:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise PlanError(f"{label} has an unknown key {key!r} (keys: {list(known)}){hint}")


def _filled(value: Any, number: int, previous: str | None, label: str) -> Any:
    """Return plain data with the words replaced; ``{round}`` alone becomes a number."""
    match value:
        case "{round}":
            return number
        case "{previous}" if previous is None:
            return None
        case str():
            return _WORD.sub(lambda word: _word(word, number, previous, label), value)
        case Mapping():
            return {key: _filled(item, number, previous, label) for key, item in value.items()}
        case list() | tuple():
            items = [_filled(item, number, previous, label) for item in value]
            return [
                item
                for old, item in zip(value, items, strict=True)
                if not (old == "{previous}" and item is None)
            ]
    return value


def _word(found: re.Match[str], number: int, previous: str | None, label: str) -> str:
    """Return what stands for ``{word}``; braces around other words stay. PlanError for one that
    is nearly a word.
    """
    match found[1]:
        case "round":
            return str(number)
        case "previous":
            if previous is None:
                raise PlanError(
                    f"{label} has no round before its first: give it after=, the node that it "
                    "comes after"
                )
            return previous
        case other:
            hint = did_you_mean(other, _WORDS)
            if hint:
                raise PlanError(
                    f"{label} has {found[0]!r}, which stands for nothing (there are: {{round}}, "
                    f"{{previous}}){hint}"
                )
            return found[0]
