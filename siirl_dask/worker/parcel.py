"""The plans of a run as bytes that every worker can open, also one that cannot import the user's own files.

Functions of modules under the working directory or beside the script being run, and of files that are named by their
path, travel by value, as those of the script itself do. Packages that are installed are imported on the workers.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import cloudpickle

from siirl_dask.coordinator.dataloader import Source
from siirl_dask.errors import PlanError, RunError
from siirl_dask.planner import Plan

Phases = Mapping[str, tuple[Plan, Source]]
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ELSEWHERE = ("siirl_dask", "siirl_storage", "__main__", "__mp_main__")  # on every worker; by value in any case


def pack(phases: Phases) -> bytes:
    """PlanError when something of a node or role cannot travel.

    In one explicit dump: Dask pickles what it can by reference first, and what it then pickles by value is not told to.
    """
    with _by_value(_own_modules()):
        try:
            return bytes(cloudpickle.dumps(phases))
        except Exception as error:  # pickling asks any object of the user's
            raise PlanError(
                "the nodes and roles cannot be sent to the workers: a function, an option or a module of yours that "
                f"they use cannot be pickled: {type(error).__name__}: {error}"
            ) from error


def unpack(parcel: bytes) -> Phases:
    """RunError when this process lacks a package that the nodes and roles use."""
    try:
        phases: Phases = cloudpickle.loads(parcel)
    except Exception as error:  # a module that is imported here may raise anything
        raise RunError(
            f"a worker cannot open the run's nodes and roles: {type(error).__name__}: {error}; packages that they use "
            "must be installed on the workers, files of yours must be under the working directory or beside the script"
        ) from error
    return phases


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    already = cloudpickle.list_registry_pickle_by_value()
    mine = [module for module in modules if module.__name__ not in already]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[ModuleType]:
    """Modules that are the user's own, wherever in them a plan's functions are."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    folders = {Path.cwd(), *([Path(script).resolve().parent] if script else [])}
    standard = sysconfig.get_path("stdlib") + os.sep
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or name.split(".")[0] in _ELSEWHERE or getattr(module, "__name__", None) != name:
            continue
        installed = file.startswith(standard) or any(folder in file for folder in _INSTALLED)
        if name.endswith(".py") or (not installed and any(Path(file).is_relative_to(folder) for folder in folders)):
            found.append(module)
    return found
