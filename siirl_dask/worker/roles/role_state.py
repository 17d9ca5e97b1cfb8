"""Builds a worker's roles, saves and restores their states for checkpoints, and passes the objects
on to the next launch of a run that has lost a worker, which loads only their states.

A role has a state if the object that it built has ``state()`` and ``load_state(state)``: nested
mappings of tensors and plain values. The workers of a role save a state with tensors together; a
state without tensors is reported to the driver instead. A state whose ``progress`` is empty never
changes, and is not saved.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

import torch
from siirl_storage import FileDigest, join

from siirl_dask.context import Closes, Device, DeviceKind, KeepsGroups, Rank, Sleeps
from siirl_dask.devices import accelerator
from siirl_dask.errors import CheckpointError, RunError
from siirl_dask.planner import Iteration, Role
from siirl_dask.trace import Lane, Recorder
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.named_errors import named_errors
from siirl_dask.worker.phase_loaders import PhaseLoaders
from siirl_dask.worker.stop import StopFlag, result_of

logger = logging.getLogger("siirl_dask.worker")
States = dict[str, dict[str, Any]]
"""A state for each role."""


class StateStore(Protocol):
    """Saves states at a URL and loads them; all ranks of ``group`` call it alike. Raises
    CheckpointError.
    """

    def save(
        self,
        url: str,
        state: dict[str, Any],
        group: Any,
        progress: Callable[[], None],
    ) -> Future[dict[str, FileDigest]]:
        """Begin to write ``state``, which may change once this returns. The future is done when all
        ranks have written it; it holds the digests of this rank's files by name. ``progress`` is
        called as parts are written.
        """
        ...

    def load(
        self,
        url: str,
        state: dict[str, Any],
        group: Any,
        progress: Callable[[], None],
    ) -> None:
        """Load into ``state``, in place."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeFrom:
    """The checkpoint from which a run resumes."""

    url: str
    roles: Sequence[str]
    """Roles that have a folder in the checkpoint."""
    states: Mapping[str, Mapping[str, Any]]
    """States of the other roles, by role."""
    positions: Mapping[str, int]
    """Positions of the dataloaders, by phase."""


@dataclass(frozen=True, slots=True)
class SavedStates:
    """A worker's part of a checkpoint, while it is being written."""

    roles: list[str] = field(default_factory=list)
    """Roles whose states go into folders."""
    states: States = field(default_factory=dict)
    """States of roles without a tensor, by role."""
    writes: dict[str, Future[dict[str, FileDigest]]] = field(default_factory=dict)
    """Futures by role: each is done when the role's folder is written, with digests of this
    worker's files by name."""

    def as_data(self) -> dict[str, Any]:
        """Return the report for the driver. States are JSON texts: Dask's messages would change
        tuples and keys.
        """
        return {
            "roles": self.roles,
            "states": {role: json.dumps(state) for role, state in self.states.items()},
        }


class RoleStates:
    """Saves and restores the states of one worker's roles.

    ``groups`` has a process group of each role's workers that nothing else uses. ``progress`` is
    called whenever something of a state is written or read.
    """

    def __init__(
        self,
        store: StateStore,
        resources: Mapping[str, Any],
        groups: Mapping[str, Any],
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._progress = progress
        self._resources = {
            name: resource for name, resource in resources.items() if has_state(resource)
        }
        with_tensors = [
            name for name, resource in self._resources.items() if _has_tensors(resource.state())
        ]
        self._groups = {name: groups[name] for name in with_tensors}

    def restore(self, checkpoint: ResumeFrom) -> None:
        """Load every role's state. CheckpointError when the checkpoint lacks a role, or its
        state does not fit.
        """
        for name, resource in self._resources.items():
            if name not in self._groups:
                self._load_plain_state(name, checkpoint.states.get(name))
                continue
            state = resource.state()
            if name not in checkpoint.roles:
                raise CheckpointError(
                    f"{checkpoint.url} has no role {name!r} (roles: {checkpoint.roles})"
                )
            self._store.load(join(checkpoint.url, name), state, self._groups[name], self._progress)
            resource.load_state(state)

    def save(self, url: str) -> SavedStates:
        """Begin to write every role's state below ``url``. CheckpointError for a state that
        cannot be saved.
        """
        saved = SavedStates()
        for name, resource in self._resources.items():
            state = resource.state()
            if name in self._groups:
                saved.roles.append(name)
                saved.writes[name] = self._store.save(
                    join(url, name), state, self._groups[name], self._progress
                )
            else:
                saved.states[name] = _checked_plain_state(name, state)
        return saved

    def _load_plain_state(self, name: str, state: Mapping[str, Any] | None) -> None:
        if state is None:
            raise CheckpointError(f"the checkpoint has no state of role {name!r}")
        try:
            self._resources[name].load_state(dict(state))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"role {name!r} cannot take {state!r}: {type(error).__name__}: {error}"
            ) from error


def has_state(resource: Any) -> bool:
    """Return whether a role's object has a state that changes."""
    if not hasattr(resource, "state") or not hasattr(resource, "load_state"):
        return False
    state = resource.state()
    if not state:
        return False
    changes: bool = state.get("progress") != {}
    return changes


def _has_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_has_tensors(inner) for inner in state.values())
    return isinstance(state, torch.Tensor)


def _checked_plain_state(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state without tensors. CheckpointError unless JSON gives the same values back."""
    try:
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError):
        same = False
    if not same:
        raise CheckpointError(
            f"role {name!r}: state() gave {str(state)[:200]}: expected tensors somewhere in it, or "
            "finite numbers, texts, lists and mappings by text alone"
        )
    return state


def build_roles(
    roles: Sequence[Role],
    device: Device,
    ranks: Mapping[str, Rank],
    progress: TaskProgress | None = None,
    reused: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Build each role that this worker has a rank in, and return the objects by role.

    ``reused`` are objects of an earlier run, by role, which are not built again: see
    ``BuiltRoles``.

    Roles are built in the order of ``ranks``, which is the same on all workers. On an accelerator
    an object with a ``sleep()`` sleeps while the next roles are built: an engine that is awake
    would hold the memory they load into. It wakes by itself when it is used.

    A SiirlError from a role's build names the role and the worker in a note; any other exception
    becomes a RunError. All objects are closed when one cannot be built.
    """
    if progress is None:
        progress = TaskProgress()
    build_of = {role.name: role.build for role in roles}
    resources: dict[str, Any] = dict(reused)
    try:
        for name, resource in reused.items():
            resource.join_groups(ranks[name])
            if len(reused) < len(ranks):
                _sleep(resource, device)
        for name, rank in ranks.items():
            if name in reused:
                continue
            with (
                progress.at(f"the building of role {name!r}"),
                progress.trace.span(Lane.COMPUTE, "start", f"role {name}"),
                named_errors(f"role {name!r}, worker {device.worker!r}", RunError),
            ):
                resource = build_of[name](device, rank)
                resources[name] = resource
            if len(resources) < len(ranks):
                _sleep(resource, device)
    except Exception:
        close_roles(resources)
        raise
    return resources


def _sleep(resource: Any, device: Device) -> None:
    if device.kind is not DeviceKind.CPU and isinstance(resource, Sleeps):
        resource.sleep()


def close_roles(resources: Mapping[str, Any]) -> None:
    """Call ``close`` of each object that has it, even where another one's fails: no engine must
    stay in memory.

    Raises a failure when all have been called.
    """
    with ExitStack() as closing:
        for resource in reversed(list(resources.values())):
            if isinstance(resource, Closes):
                closing.callback(resource.close)


@dataclass(frozen=True, slots=True)
class BuiltRoles:
    """The objects that a run has built on one worker, by role.

    An object is reused if it is a ``KeepsGroups`` (as a ``HoldsNoGroups`` is), and its role is
    placed on the same worker and device. In an elastic run its rank may be another one, or among
    more or fewer. The DAG, and so builders and options, are the same: both runs are launches of one
    start.
    """

    device: Device
    resources: Mapping[str, Any]

    def close(self) -> None:
        """Close all of them, and give their memory back to the device: torch would keep it for this
        process, which on an existing cluster outlives the run, and other processes would lack it.
        """
        try:
            close_roles(self.resources)
        finally:
            self._give_back_memory()

    def _give_back_memory(self) -> None:
        if self.device.kind is DeviceKind.CPU:
            return
        gc.collect()  # models and engines are in cycles
        try:
            accelerator.free_cache(self.device.kind)
        except RuntimeError as error:  # of a device that has failed before
            logger.warning("the memory of %s is not given back: %s", self.device.torch_name, error)

    def reusable(
        self,
        worker: str,
        placement: Mapping[str, Sequence[str]],
        *,
        resumes: bool,
    ) -> BuiltRoles:
        """Return the objects that the next launch can reuse, which have left their process groups;
        close all others.

        ``placement`` has the workers of each role. ``resumes`` says whether a checkpoint will be
        loaded: without one an object with a state, such as a trainer, must be built again.
        """
        reused = {}
        for name, resource in self.resources.items():
            if worker not in placement.get(name, ()) or not isinstance(resource, KeepsGroups):
                continue
            if not resumes and has_state(resource):
                continue
            if resource.leave_groups():
                reused[name] = resource
        close_roles(
            {name: resource for name, resource in self.resources.items() if name not in reused}
        )
        return BuiltRoles(self.device, reused)

    def for_device(self, device: Device) -> Mapping[str, Any]:
        """Return the objects if they are on ``device``; close them otherwise."""
        if device == self.device:
            return self.resources
        close_roles(self.resources)
        return {}


class CheckpointWriter:
    """Saves the roles' states and the dataloaders' positions, and reports when they are copied
    and when written.
    """

    def __init__(
        self,
        states: RoleStates,
        loaders: PhaseLoaders,
        report: Callable[[dict[str, Any]], None],
        loop: asyncio.AbstractEventLoop,
        stop: StopFlag,
        trace: Recorder,
    ) -> None:
        self._states = states
        self._loaders = loaders
        self._report = report
        self._loop = loop
        self._stop = stop
        self._trace = trace
        self._written: Future[None] | None = None

    def save(self, iteration: Iteration, url: str) -> None:
        """Begin to write this worker's part of a checkpoint at ``url``, once that of the
        previous one is written.
        """
        with self._trace.span(Lane.STORAGE, "save", "checkpoint"):
            if self._written is not None:
                result_of(self._written, self._stop)
            saved = self._states.save(url)
        self._written = asyncio.run_coroutine_threadsafe(
            self._report_written(iteration, saved.writes), self._loop
        )
        saved_data = {**saved.as_data(), "positions": self._loaders.positions}
        self._report(
            {"kind": "done", "sequence": iteration.sequence, "metrics": {}, "saved": saved_data}
        )

    async def _report_written(
        self, iteration: Iteration, writes: Mapping[str, Future[dict[str, FileDigest]]]
    ) -> None:
        started = time.monotonic_ns()
        try:
            written = await asyncio.gather(*map(asyncio.wrap_future, writes.values()))
        except CheckpointError as error:
            self._report({"kind": "unsaved", "what": f"{iteration}: {error}"})
        else:
            files: dict[str, tuple[int, str]] = {}
            for role, digests in zip(writes, written, strict=True):
                files |= {
                    f"{role}/{name}": (digest.nbytes, digest.sha256)
                    for name, digest in digests.items()
                }
            total = sum(nbytes for nbytes, _ in files.values())
            self._trace.add(Lane.STORAGE, "write", "checkpoint", started, amount=total)
            self._report({"kind": "written", "sequence": iteration.sequence, "files": files})
