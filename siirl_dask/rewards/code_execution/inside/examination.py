"""A test, run in a process that the program cannot reach: it calls the program's functions and
compares results.

The test's code is not changed. The names that it uses and does not define stand for the program's:
a function is called where the program runs, its arguments go there and its result comes back as
data.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from siirl_dask.rewards.code_execution.inside.channel import Channel
from siirl_dask.rewards.code_execution.inside.errors import UnusableTestError
from siirl_dask.rewards.code_execution.inside.program import module
from siirl_dask.rewards.code_execution.inside.values import builtin_name, decode, encode

_ENDED = 98  # as any failure: a test must not be able to catch the end of the program


def examine(task: dict[str, Any]) -> None:
    """Run a test; raises what it raises. UnusableTestError when it needs to share memory with
    the program.
    """
    program = _Program(Channel(os.dup(0), os.dup(1), task["message_size"]))
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    try:
        tree = ast.parse(task["test"], "test")
    except SyntaxError as error:
        raise UnusableTestError(f"it is not Python: {error}") from None
    sys.modules["solution"] = _Solution(program)
    names = module("test")
    used, modules = _names_used(tree)
    names |= program.names(sorted(used)) | {
        name: importlib.import_module(name) for name in sorted(modules)
    }
    exec(compile(tree, "test", "exec"), names)


def _names_used(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that may be the program's, and those of modules that the test uses and need
    not import.

    Python's own functions are never the program's: one that defines ``abs`` would else decide what
    ``abs`` means in the test. Neither is a module of the standard library, where all that a test
    does with the name is ``name.other``.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - set(dir(builtins))
    owners = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    dotted = {id(node) for node in owners}
    plain = {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in dotted
    }
    modules = (used - plain) & sys.stdlib_module_names
    return used - modules, modules


class _Program:
    """The program's side, as the test sees it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._objects: dict[int, _Remote] = {}
        self._errors: dict[str, type[Exception]] = {}

    def names(self, names: list[str]) -> dict[str, Any]:
        found = self._exchange({"ask": "names", "names": names})["names"]
        return {name: decode(found[name], self._find) for name in names if name in found}

    def ask(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Return the result of an operation on the program's objects, after the changes it made
        to its arguments.
        """
        reply = self._exchange(
            {
                "ask": operation,
                "arguments": [encode(item, _refer) for item in arguments],
                "named": {name: encode(item, _refer) for name, item in named.items()},
            }
        )
        held = {str(place): item for place, item in enumerate(arguments)} | named
        for place, data in reply["changed"].items():
            _change(held[place], decode(data, self._find))
        return decode(reply["value"], self._find)

    def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            self._channel.send(request)
            reply = self._channel.receive()
        except (EOFError, OSError):
            os._exit(_ENDED)
        if not isinstance(reply, dict):
            os._exit(_ENDED)
        if "raised" in reply:
            name, message = reply["raised"]
            raise self._error(str(name))(str(message))
        return reply

    def _find(self, kind: str, name: Any) -> Any:
        if kind == "object":
            return self._objects.setdefault(int(name), _Remote(self, int(name)))
        if kind == "error":
            return self._error(str(name))
        raise ValueError(f"the program sent a value of the unknown kind {kind!r:.50}")

    def _error(self, name: str) -> type[Exception]:
        """Return Python's exception of that name, or a new class that stands for one of the
        program's.
        """
        known = getattr(builtins, name, None)
        if isinstance(known, type) and issubclass(known, Exception):
            return known
        return self._errors.setdefault(name, type(name, (Exception,), {}))


def _refer(value: Any) -> dict[str, Any]:
    if isinstance(value, _Remote):
        return {"object": object.__getattribute__(value, "_number")}
    if name := builtin_name(value):
        return {"builtin": name}
    kind = "a function" if callable(value) else f"a value of type {type(value).__name__}"
    raise UnusableTestError(f"it passes {kind} to the program, which is not data")


def _change(old: Any, new: Any) -> None:
    """Give a container that was passed to the program the content that it got there."""
    if type(old) is not type(new):
        os._exit(_ENDED)
    if isinstance(old, list | bytearray):
        old[:] = new
    else:
        old.clear()
        old.update(new)


class _Solution(ModuleType):
    """The module ``solution``, from which a test may import what it calls."""

    def __init__(self, program: _Program) -> None:
        super().__init__("solution")
        self._program = program

    def __getattr__(self, name: str) -> Any:
        found = {} if name.startswith("__") else self._program.names([name])
        if name not in found:
            raise AttributeError(f"the program has no {name!r}")
        return found[name]


class _Remote:
    """A function or an object of the program. It cannot be compared with data, nor calculated with:
    that would be for the program to decide. Two are equal when they are the same object.
    """

    def __init__(self, program: _Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask(self, "call", *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "set", name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "put", key, value)

    def __len__(self) -> int:
        return int(_ask(self, "len"))

    def __bool__(self) -> bool:
        return bool(_ask(self, "bool"))

    def __str__(self) -> str:
        return str(_ask(self, "str"))

    def __repr__(self) -> str:
        return str(_ask(self, "repr"))

    def __iter__(self) -> Iterator[Any]:
        items = _ask(self, "iter")
        try:
            while True:
                yield _ask(items, "next")
        except StopIteration:
            return

    def __next__(self) -> Any:
        return _ask(self, "next")

    def __instancecheck__(self, value: Any) -> bool:
        if not isinstance(value, _Remote):
            return False
        return bool(object.__getattribute__(self, "_program").ask("isinstance", value, self))


def _ask(remote: _Remote, operation: str, *arguments: Any, **named: Any) -> Any:
    return object.__getattribute__(remote, "_program").ask(operation, remote, *arguments, **named)
