"""What a worker does for a checkpoint: each of its roles that has a state is saved, and restored, by its own group.

A role has a state if what it built has ``state()`` and ``load_state(state)``: nested mappings of tensors and plain
values. One without a tensor is told to the driver instead. One whose ``progress`` is empty never changes, and is left
out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import format_exc
from typing import Any, Protocol

import torch
from siirl_storage import join

from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.errors import CheckpointError, RunError, SiirlError
from siirl_dask.planner import Role

States = dict[str, dict[str, Any]]


class StateStore(Protocol):
    """Puts states below a URL and takes them back; all ranks of ``group`` call it alike. CheckpointError."""

    def save(self, url: str, state: dict[str, Any], group: Any) -> Future[None]:
        """The state may change when this returns; it is written when the future is done."""
        ...

    def load(self, url: str, state: dict[str, Any], group: Any) -> None:
        """Fill ``state`` in place."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeFrom:
    """The checkpoint that a run goes on from."""

    url: str
    roles: Sequence[str]
    """Those that have a folder in it."""
    states: Mapping[str, Mapping[str, Any]]
    """Those of the other roles."""
    positions: Mapping[str, int]
    """Of the dataloaders, by phase."""


@dataclass(frozen=True, slots=True)
class SavedStates:
    """A checkpoint that this worker has begun to write."""

    roles: list[str] = field(default_factory=list)
    """Those that get a folder."""
    states: States = field(default_factory=dict)
    """Of roles whose state holds no tensor."""
    writes: list[Future[None]] = field(default_factory=list)

    def as_data(self) -> dict[str, Any]:
        """What the driver is told of it. States as JSON: what travels would turn tuples and keys into others."""
        return {"roles": self.roles, "states": {role: json.dumps(state) for role, state in self.states.items()}}


class RoleStates:
    """Of one worker's roles. ``groups``: of each role, a process group of its workers that nothing else uses."""

    def __init__(self, store: StateStore, resources: Mapping[str, Any], groups: Mapping[str, Any]) -> None:
        self._store = store
        self._resources = {name: one for name, one in resources.items() if _has_state(one)}
        self._groups = {name: groups[name] for name, one in self._resources.items() if _has_tensors(one.state())}

    def restore(self, checkpoint: ResumeFrom) -> None:
        """CheckpointError when a role that learns is not in it, or does not fit."""
        for name, resource in self._resources.items():
            if name not in self._groups:
                self._load_plain(name, checkpoint.states.get(name))
                continue
            state = resource.state()
            if name not in checkpoint.roles:
                raise CheckpointError(f"{checkpoint.url} has nothing of role {name!r} (roles: {checkpoint.roles})")
            self._store.load(join(checkpoint.url, name), state, self._groups[name])
            resource.load_state(state)

    def save(self, url: str) -> SavedStates:
        saved = SavedStates()
        for name, resource in self._resources.items():
            state = resource.state()
            if name in self._groups:
                saved.roles.append(name)
                saved.writes.append(self._store.save(join(url, name), state, self._groups[name]))
            else:
                saved.states[name] = _plain(name, state)
        return saved

    def _load_plain(self, name: str, state: Mapping[str, Any] | None) -> None:
        if state is None:
            raise CheckpointError(f"the checkpoint has no state of role {name!r}")
        try:
            self._resources[name].load_state(dict(state))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"role {name!r} cannot take {state!r}: {type(error).__name__}: {error}") from error


def _has_state(resource: Any) -> bool:
    if not (hasattr(resource, "state") and hasattr(resource, "load_state")):
        return False
    state = resource.state()
    return bool(state) and state.get("progress") != {}


def _has_tensors(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_has_tensors(inner) for inner in state.values())
    return isinstance(state, torch.Tensor)


def _plain(name: str, state: dict[str, Any]) -> dict[str, Any]:
    try:
        same = json.loads(json.dumps(state, allow_nan=False)) == state
    except (TypeError, ValueError):
        same = False
    if not same:
        raise CheckpointError(
            f"role {name!r}: state() gave {str(state)[:200]}: expected tensors somewhere in it, or finite numbers, "
            "texts, lists and mappings by text alone"
        )
    return state


def build_roles(roles: Sequence[Role], device: Device, ranks: Mapping[str, Rank]) -> dict[str, Any]:
    """What each role that this worker has a rank in builds, in the order of ``ranks``, which is that of its peers too.

    On an accelerator whatever has a ``sleep()`` sleeps while the next are built: an engine that is awake would hold the
    memory they load into. It wakes by itself when it is asked for something.

    What a role's build raises on purpose says which role and worker it was; anything else is a RunError that does.
    """
    build = {role.name: role.build for role in roles}
    resources: dict[str, Any] = {}
    for name, rank in ranks.items():
        with _named(name, device.worker):
            resources[name] = resource = build[name](device, rank)
        last = len(resources) == len(ranks)
        if not last and device.kind is not DeviceKind.CPU and (sleep := getattr(resource, "sleep", None)):
            sleep()
    return resources


@contextmanager
def _named(role: str, worker: str) -> Iterator[None]:
    """Whatever goes wrong inside is said to be of the role."""
    where = f"role {role!r}, worker {worker!r}"
    try:
        yield
    except SiirlError as error:
        error.add_note(f"in {where}")
        raise
    except Exception as error:
        failure = RunError(f"{where}: {type(error).__name__}: {error}")
        failure.add_note(format_exc())  # a traceback does not cross processes
        raise failure from error
