"""One spelling for what a DAG is made of, so that the same DAG from YAML and from Python compares and hashes equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any

from siirl_dask.errors import PlanError


def function_name(fn: object) -> str:
    """``module:qualname`` of a module-level function or class. PlanError for a lambda or a nested function."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if not module or not name:
        raise PlanError(f"{fn!r} is not a module-level function: define it with def at the top of a module")
    if "<" in name or "." in name:
        kind = "a lambda or a nested function" if "<" in name else "a method or a nested class"
        raise PlanError(f"{module}:{name} is {kind}: define it with def at the top of a module")
    return f"{module}:{name}"


def canonical(value: Any) -> Any:
    """``value`` as plain JSON data. PlanError names a value that no YAML could spell."""
    match value:
        case None | bool() | int() | float() | str() if not isinstance(value, Enum):
            return value
        case Enum():
            return value.value
        case partial():
            if value.args:
                raise PlanError(f"partial({function_name(value.func)}, ...) has positional arguments: name them")
            return {"run": function_name(value.func), "with": canonical(value.keywords)}
        case Mapping():
            return {str(key): canonical(item) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
        case list() | tuple():
            return [canonical(item) for item in value]
        case _ if is_dataclass(value) and not isinstance(value, type):
            return {f.name: canonical(getattr(value, f.name)) for f in fields(value)}
        case _ if callable(value):
            return {"run": function_name(value), "with": {}}
    raise PlanError(
        f"a value of type {type(value).__name__} cannot be part of a DAG: "
        "give numbers, strings, lists, dicts, dataclasses or module-level functions"
    )


def canonical_text(value: Any) -> str:
    return json.dumps(canonical(value), sort_keys=True)
