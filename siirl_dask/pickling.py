"""Serializes a user's functions for other processes, which may be unable to import them.

cloudpickle sends the code of such functions. Since 3.1.3 it leaves out the files that they are
defined in, so that no stack of a reward that hangs or raises names the user's line: here they stay.
"""

from __future__ import annotations

import io
import os
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

import cloudpickle

_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_NEVER_BY_VALUE = ("siirl_dask", "siirl_storage")  # installed on every worker
_ALWAYS_BY_VALUE = ("__main__", "__mp_main__")  # by cloudpickle itself


def dumps(value: object) -> bytes:
    """Serialize ``value`` as ``cloudpickle.dumps`` does, with the names of the files of
    functions.
    """
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _reduce(code: CodeType) -> tuple[Callable[..., CodeType], tuple[Any, ...]]:
    make, arguments, *_ = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _with_file, (make, arguments, code.co_filename)


def _with_file(make: Callable[..., CodeType], arguments: tuple[Any, ...], file: str) -> CodeType:
    return make(*arguments).replace(co_filename=file)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce}, cloudpickle.Pickler.dispatch_table)


@contextmanager
def own_modules_by_value() -> Iterator[None]:
    """Let cloudpickle serialize the user's own modules by value inside the block."""
    modules = _own_modules()
    before = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ not in before]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[ModuleType]:
    """Return the imported modules that are the user's own: in the working directory or beside
    the script.
    """
    folders = {Path.cwd()}
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script:
        folders.add(Path(script).resolve().parent)
    imported = list(sys.modules.items())
    return [module for name, module in imported if _is_own(name, module, folders)]


def _is_own(name: str, module: ModuleType, folders: Collection[Path]) -> bool:
    """Return whether a module is one of the user's in ``folders``, which cloudpickle would send
    by reference.
    """
    file = getattr(module, "__file__", None)
    if not file or getattr(module, "__name__", None) != name:
        return False
    if name.split(".")[0] in _NEVER_BY_VALUE + _ALWAYS_BY_VALUE:
        return False
    if name.endswith(".py"):
        return True
    if file.startswith(_STANDARD) or any(folder in file for folder in _INSTALLED):
        return False
    return any(Path(file).is_relative_to(folder) for folder in folders)
