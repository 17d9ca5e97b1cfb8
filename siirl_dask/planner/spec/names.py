"""Functions and specs by name: ``module:function``, or ``folder/file.py:function`` for a file that
is on no Python path.
"""

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

from siirl_dask.errors import ConfigError, PlanError, did_you_mean
from siirl_dask.planner.spec.ecosystems import environment_named
from siirl_dask.wording import function_with_place

T = TypeVar("T")
PACKAGE = __name__.split(".")[0]
# for anything else, and what ecosystems.py names, no module is imported: commands/planning/analyze.py
# looks for both
_NAME = re.compile(r"\w+")
_received: dict[str, object] = {}


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that ``module:function`` or ``folder/file.py:function`` names.

    An environment of another package has its own name there, ``gymnasium:FrozenLake-v1``; see
    ``ecosystems.py``. A file's path is absolute or relative to the working directory. A file is loaded once in a
    process, as a module that is named by its path, so that ``function_name`` spells the function as
    it was given. PlanError, with the nearest spelling, if there is no such function, or if
    importing it fails.
    """
    other = environment_named(str(name))
    if other is not None:
        return other
    found: Callable[..., Any] = _find(name, "function", callable)
    return found


def load_named_spec(key: str, text: str, kind: type[T]) -> T:
    """Return the object of class ``kind`` that ``text``, the value of ``key``, names as
    ``module:NAME`` or ``file.py:NAME``, found as ``resolve`` finds a function; in a worker, the one
    that the run has sent.

    ConfigError, with the nearest spelling, if there is none, or if importing it fails.
    """
    found = _received.get(text)
    if isinstance(found, kind):
        return found
    try:
        found = _find(text, kind.__name__, lambda one: isinstance(one, kind))
    except PlanError as error:
        raise ConfigError(f"{key}: {error}") from error
    assert isinstance(found, kind)
    return found


def receive_specs(specs: Mapping[str, object]) -> None:
    """Let ``load_named_spec`` find ``specs``, which the run's driver has sent, by the texts that
    name them, and none of an earlier run's.
    """
    _received.clear()
    _received.update(specs)


def _find(name: str, what: str, fits: Callable[[object], bool]) -> Any:
    """Return the object that ``name`` names. PlanError unless it is there, and ``fits`` what is
    looked for.
    """
    origin, _, attribute = str(name).rpartition(":")
    if not origin or not _NAME.fullmatch(attribute):
        shown = "NAME"
        if what == "function":
            shown = "function"
        raise PlanError(f"{name!r} names no {what}: expected 'module:{shown}' or 'file.py:{shown}'")
    is_file = origin.endswith(".py")
    module = _load(name, Path(origin)) if is_file else _import(name, origin)
    found = getattr(module, attribute, None)
    if fits(found):
        return found
    hint = did_you_mean(attribute, (known for known, value in vars(module).items() if fits(value)))
    kind = "module"
    if is_file:
        kind = "file"
    instead = ""
    if found is not None:
        instead = f", which is of type {type(found).__name__}"
    raise PlanError(f"{name!r}: {kind} {origin!r} has no {what} {attribute!r}{instead}{hint}")


def _import(name: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(origin)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        missing = None
        if isinstance(error, ModuleNotFoundError):
            missing = error.name
        if missing is None or not (origin == missing or origin.startswith(f"{missing}.")):
            raise _failed(name, error) from error
        file = f"{origin.replace('.', '/')}.py"
        hint = did_you_mean(origin, [path.stem for path in Path.cwd().glob("*.py")])
        if Path(file).is_file():
            hint = f"; for the file, write {file!r}"
        raise PlanError(
            f"{name!r}: there is no module {origin!r} on the Python path{hint}"
        ) from error


def _load(name: str, path: Path) -> ModuleType:
    spelled = os.path.normpath(path)
    real = path.resolve()
    for key, loaded in list(sys.modules.items()):
        if key.endswith(".py") and getattr(loaded, "__file__", None) == str(real):
            return loaded
    if not real.is_file():
        near = (file.as_posix() for file in path.parent.glob("*.py"))
        raise PlanError(
            f"{name!r}: there is no file {str(path)!r} in "
            f"{Path.cwd()}{did_you_mean(str(path), near)}"
        )
    # the working directory may have changed since another file of this spelling was loaded
    spec = importlib.util.spec_from_file_location(
        str(real) if spelled in sys.modules else spelled, real
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # first: dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script that reads its own command line exits
        del sys.modules[spec.name]
        raise _failed(name, error) from error
    return module


def _failed(name: str, error: BaseException) -> PlanError:
    """Return the error of a failed import, with the place in the user's own code."""
    if isinstance(error, SyntaxError) and error.filename:
        at = f"{error.filename}:{error.lineno}"
        message = error.msg
    else:
        frames = traceback.extract_tb(error.__traceback__)
        own_frames = [frame for frame in frames if not frame.filename.startswith("<frozen")]
        at = f"{own_frames[-1].filename}:{own_frames[-1].lineno}"
        message = str(error)
    return PlanError(
        f"{name!r}: importing it fails at {at}: {type(error).__name__}: {message}"
        f"{_hint_to_package(name, error)}"
    )


def _hint_to_package(name: str, error: BaseException) -> str:
    """Return how to name a function whose file imports with a dot: Python has looked for the file
    itself as the package. An empty string for any other error.
    """
    file = str(name).rpartition(":")[0]
    stem = os.path.normpath(file).removesuffix(".py")
    if not isinstance(error, ModuleNotFoundError):
        return ""
    if error.name not in (stem, str(Path(stem).resolve())):
        return ""
    hint = "; a file that imports with a dot is part of a package, and is named by its module"
    if "/" in stem and not Path(stem).is_absolute():
        return f"{hint}, {stem.replace('/', '.')!r}"
    return hint


def function_name(fn: object) -> str:
    """Return ``module:name`` of a module-level function or class, by the shortest package that
    publishes it.

    A package publishes a name by importing it in its ``__init__.py``. Names that a run wrote down
    therefore still resolve when the package's modules are rearranged. PlanError for a lambda, a
    nested function or a method.
    """
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", None)
    if not module or not name:
        raise PlanError(
            f"{function_with_place(fn)} is not a module-level function: define it with def at the "
            "top of a module"
        )
    if "<" in name or "." in name:
        kind = "a method or a nested class"
        if "<" in name:
            kind = "a lambda or a nested function"
        raise PlanError(f"{module}:{name} is {kind}: define it with def at the top of a module")
    return f"{_publisher(fn, module, name)}:{name}"


def short_name(fn: object) -> str:
    """Return the name of a function, or of a partial's function, without the name of this
    package.
    """
    return function_name(getattr(fn, "func", fn)).removeprefix(PACKAGE)


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
                raise PlanError(
                    f"partial({function_name(value.func)}, ...) has positional arguments: name them"
                )
            return {"run": function_name(value.func), "with": canonical(value.keywords)}
        case Mapping():
            return {
                str(key): canonical(item)
                for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))
            }
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
