"""Functions by name: ``module:function``, or ``folder/file.py:function`` for a file that is on no Python path."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from siirl_dask.errors import PlanError, did_you_mean

_T = TypeVar("_T")
_NAME = re.compile(r"\w+")  # anything else is no name, and must not have a module imported: see commands/analyze.py


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` or ``folder/file.py:function`` names.

    A file's path is absolute or relative to the working directory. A file is loaded once in a process, as a module that
    is named by its path, so that ``function_name`` spells the function as it was given. PlanError, with the nearest
    spelling, if there is no such function, or if importing it fails.
    """
    origin, _, function = str(name).rpartition(":")
    if not origin or not _NAME.fullmatch(function):
        raise PlanError(f"{name!r} names no function: expected 'module:function' or 'file.py:function'")
    module = _module(name, origin)
    fn = getattr(module, function, None)
    if not callable(fn):
        hint = did_you_mean(function, dir(module))
        raise PlanError(f"{name!r}: {_place(origin)} has no function {function!r}{hint}")
    return fn  # type: ignore[no-any-return]


def resolve_object(name: str, kind: type[_T]) -> _T:
    """Return the object of class ``kind`` that ``module:NAME`` or ``folder/file.py:NAME`` names, loaded as ``resolve``
    loads a function.

    PlanError, with the nearest spelling, if there is no such object, or if importing its module fails.
    """
    origin, _, attribute = str(name).rpartition(":")
    if not origin or not _NAME.fullmatch(attribute):
        raise PlanError(f"{name!r} names no {kind.__name__}: expected 'module:NAME' or 'file.py:NAME'")
    module = _module(name, origin)
    found = getattr(module, attribute, None)
    if isinstance(found, kind):
        return found
    near = [own for own, value in vars(module).items() if isinstance(value, kind)]
    hint = did_you_mean(attribute, near)
    if found is not None:
        raise PlanError(f"{name!r} is of type {type(found).__name__}: expected an object of {kind.__name__}{hint}")
    raise PlanError(f"{name!r}: {_place(origin)} has no {kind.__name__} {attribute!r} (it has: {near}){hint}")


def _module(name: str, origin: str) -> ModuleType:
    """Return the module that ``name`` begins with, or that of the file."""
    if origin.endswith(".py"):
        return _load(name, Path(origin))
    return _import(name, origin)


def _place(origin: str) -> str:
    kind = "file" if origin.endswith(".py") else "module"
    return f"{kind} {origin!r}"


def _import(name: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(origin)
    except Exception as error:  # a user's module may raise anything
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not (origin == missing or origin.startswith(f"{missing}.")):
            raise _failed(name, error) from error
        file = f"{origin.replace('.', '/')}.py"
        hint = did_you_mean(origin, [path.stem for path in Path.cwd().glob("*.py")])
        if Path(file).is_file():
            hint = f"; for the file, write {file!r}"
        raise PlanError(f"{name!r}: there is no module {origin!r} on the Python path{hint}") from error


def _load(name: str, path: Path) -> ModuleType:
    spelled = os.path.normpath(path)
    real = path.resolve()
    for key, loaded in list(sys.modules.items()):
        if key.endswith(".py") and getattr(loaded, "__file__", None) == str(real):
            return loaded
    if not real.is_file():
        near = (file.as_posix() for file in path.parent.glob("*.py"))
        raise PlanError(f"{name!r}: there is no file {str(path)!r} in {Path.cwd()}{did_you_mean(str(path), near)}")
    # the working directory may have changed since another file of this spelling was loaded
    spec = importlib.util.spec_from_file_location(str(real) if spelled in sys.modules else spelled, real)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # first: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise _failed(name, error) from error
    return module


def _failed(name: str, error: Exception) -> PlanError:
    """Return the error of a failed import, with the place in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        at = f"{error.filename}:{error.lineno}"
        message = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        at = f"{own_frames[-1].filename}:{own_frames[-1].lineno}"
        message = str(error)
    return PlanError(f"{name!r}: importing it fails at {at}: {type(error).__name__}: {message}")


def function_name(fn: object) -> str:
    """Return ``module:name`` of a module-level function or class, by the shortest package that publishes it.

    A package publishes a name by importing it in its ``__init__.py``. Names that a run wrote down therefore still
    resolve when the package's modules are rearranged. PlanError for a lambda, a nested function or a method.
    """
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None)
    if not module or not name:
        raise PlanError(f"{fn!r} is not a module-level function: define it with def at the top of a module")
    if "<" in name or "." in name:
        kind = "a lambda or a nested function" if "<" in name else "a method or a nested class"
        raise PlanError(f"{module}:{name} is {kind}: define it with def at the top of a module")
    return f"{_publisher(fn, module, name)}:{name}"


def _publisher(fn: object, module: str, name: str) -> str:
    """Return the outermost package of ``module`` whose ``name`` is ``fn``, or ``module`` itself."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        if vars(sys.modules.get(package, object)).get(name) is fn:
            return package
    return module


def canonical(value: Any) -> Any:
    """Return ``value`` as plain JSON data. PlanError for a value that no YAML could spell."""
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
    """Return the JSON text of ``canonical(value)``, with sorted keys."""
    return json.dumps(canonical(value), sort_keys=True)
