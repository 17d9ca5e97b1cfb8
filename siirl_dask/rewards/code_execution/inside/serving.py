"""A program of a model, run as a module whose functions a test calls from outside."""

from __future__ import annotations

import builtins
import json
import operator
from collections.abc import Callable
from typing import Any

from siirl_dask.rewards.code_execution.inside.channel import Channel
from siirl_dask.rewards.code_execution.inside.program import module, silence
from siirl_dask.rewards.code_execution.inside.values import decode, encode

_MUTABLE = (list, dict, set, bytearray)
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    "get": getattr,
    "set": setattr,
    "item": operator.getitem,
    "put": operator.setitem,
    "len": len,
    "iter": iter,
    "next": next,
    "bool": bool,
    "str": str,
    "repr": repr,
    "isinstance": isinstance,
}
"""Operations that a test may ask for on an object that stays with the program."""


def serve_solution(task: dict[str, Any]) -> None:
    """Run the program, not as the main module, then do what the test asks over standard input
    and output.
    """
    channel = Channel(*silence(), task["message_size"])
    names = module("solution")
    objects = _ServedObjects()
    exec(compile(task["code"], "solution", "exec"), names)
    while True:
        request = channel.receive()
        try:
            reply = objects.answer(request, names)
            channel.send(reply)
        except Exception as error:  # whatever the program raises is the test's to catch
            channel.send({"raised": [type(error).__name__, str(error)[:1000]]})


class _ServedObjects:
    """The program's values that the test holds by number, because they cannot be sent."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._numbers: dict[int, int] = {}

    def answer(self, request: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
        if request["ask"] == "names":
            found = {name: names[name] for name in request["names"] if name in names}
            return {"names": {name: encode(value, self._refer) for name, value in found.items()}}
        arguments = [decode(item, self._find) for item in request["arguments"]]
        named = {name: decode(item, self._find) for name, item in request["named"].items()}
        held = {str(place): item for place, item in enumerate(arguments)} | named
        before = {
            place: self._as_text(item) for place, item in held.items() if isinstance(item, _MUTABLE)
        }
        value = _OPERATIONS[request["ask"]](*arguments, **named)
        changed = {
            place: encode(held[place], self._refer)
            for place, text in before.items()
            if self._as_text(held[place]) != text
        }
        return {"value": encode(value, self._refer), "changed": changed}

    def _as_text(self, value: Any) -> str:
        return json.dumps(encode(value, self._refer))

    def _refer(self, value: Any) -> dict[str, int]:
        number = self._numbers.setdefault(id(value), len(self._values))
        if number == len(self._values):
            self._values.append(value)  # kept, so that its id stays its own
        return {"object": number}

    def _find(self, kind: str, name: Any) -> Any:
        if kind == "object":
            return self._values[name]
        return getattr(builtins, name)
