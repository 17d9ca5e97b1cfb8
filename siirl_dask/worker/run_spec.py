"""What every worker of a run is told before it starts."""

from __future__ import annotations

import os
import sys
import sysconfig
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cloudpickle
from siirl_storage.files import absolute

from siirl_dask.config import Config
from siirl_dask.coordinator.dataloader import Source
from siirl_dask.errors import PlanError, RunError
from siirl_dask.planner import Phase, Plan
from siirl_dask.worker.data_plane import DataSettings
from siirl_dask.worker.role_state import ResumeFrom, StateStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """All that a worker is told about a run: plans and settings, no data."""

    run: str
    """Unique to this start of the run; messages of any other are refused."""
    url: str
    seed: int
    members: Mapping[str, str]
    """{worker name: address}, in rank order, fixed for the run."""
    phases: bytes
    """The plan and the dataset of each phase, from ``serialize_phases``."""
    builds_from: Phase
    """The phase whose plan has every role that workers build."""
    threads: int
    data: DataSettings
    store: StateStore | None = None
    """Where roles' states are saved to and restored from; None, neither is asked for."""
    resume_from: ResumeFrom | None = None
    """The checkpoint that the run resumes from; None for a new run."""

    @staticmethod
    def of(
        config: Config,
        members: Mapping[str, str],
        phases: Phases,
        store: StateStore | None = None,
        resume_from: ResumeFrom | None = None,
    ) -> RunSpec:
        """Of one more start of the run that ``config`` describes."""
        return RunSpec(
            run=uuid.uuid4().hex[:12],
            url=absolute(config.run.url),  # a worker of an existing cluster may run in another folder
            seed=config.run.seed,
            members=members,
            phases=serialize_phases(phases),
            builds_from=next(iter(phases)),
            threads=config.cluster.threads,
            data=DataSettings.of(config),
            store=store,
            resume_from=resume_from,
        )

    @property
    def plugin(self) -> str:
        return f"siirl-{self.run}"

    @property
    def topic(self) -> str:
        """Dask event topic on which workers and the supervisor report."""
        return f"siirl-{self.run}"


Phases = Mapping[Phase, tuple[Plan, Source]]
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_ELSEWHERE = ("siirl_dask", "siirl_storage", "__main__", "__mp_main__")  # on every worker; by value in any case


def serialize_phases(phases: Phases) -> bytes:
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


def deserialize_phases(data: bytes) -> Phases:
    """RunError when this process lacks a package that the nodes and roles use."""
    try:
        phases: Phases = cloudpickle.loads(data)
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
