"""Roles whose object is built at its first use: nodes that are run again on stored rows may never ask for a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from siirl_dask.context import Device, Rank
from siirl_dask.planner import Role, RoleCost, builds
from siirl_dask.planner.role_contract import provides_of
from siirl_dask.worker.role_state import ResumeFrom, RoleStates, StateStore, close_roles, has_state


@dataclass(frozen=True, slots=True)
class Past:
    """The states that a run's roles had, which their objects get when they are built."""

    checkpoint: ResumeFrom
    store: StateStore
    verify: Callable[[Collection[str]], None]
    """Compares the files of some roles with what was written; raises CheckpointError."""

    def restore(self, name: str, made: Any, rank: Rank) -> None:
        """Load the state of the role ``name`` into its object, if that has one; all its workers call this alike."""
        if not has_state(made):
            return
        if rank.rank == 0 and name in self.checkpoint.roles:
            self.verify([name])
        RoleStates(self.store, {name: made}, {name: rank.side_group}).restore(self.checkpoint)


def built_when_used(role: Role, past: Past | None = None) -> Role:
    """Return the role with an object that is built, and gets its state, when a node first asks it for anything."""
    return Role(role.name, partial(build_when_used, name=role.name, build=role.build, past=past), role.at)


def _provided(options: Mapping[str, Any], workers: Sequence[str], config: object) -> RoleCost:
    """The preflight of ``build_when_used``: nobody knows whether the object will be there, so it is not checked."""
    return RoleCost(memory=0, provides=provides_of(options["build"]))


@builds(preflight=_provided)
def build_when_used(
    device: Device, rank: Rank, *, name: str, build: Callable[..., Any], past: Past | None = None
) -> Any:
    """Return an object that becomes what ``build(device, rank)`` returns, with the state that it had in the past."""

    def make() -> Any:
        made = build(device, rank)
        try:
            if past is not None:
                past.restore(name, made, rank)
        except Exception:
            close_roles({name: made})
            raise
        return made

    return _WhenUsed(make)


def models_used(resources: Mapping[str, Any]) -> list[str]:
    """Return the roles, among those that are built when they are used, whose objects are there and have a state."""
    lazy = {name: one for name, one in resources.items() if isinstance(one, _WhenUsed)}
    return sorted(name for name, one in lazy.items() if any(map(has_state, one._made)))


class _WhenUsed:
    """Stands for an object until one of its attributes is asked for."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object, which is built now if it is not there yet."""
        if not self._made:
            self._made.append(self._make())
        return getattr(self._made[0], name)

    @property
    def shared(self) -> Any:
        """The object whose memory this one takes, if it was built: see ``Context.free_device``."""
        return next((getattr(made, "shared", self) for made in self._made), self)

    def close(self) -> None:
        """Close the object, if it was built."""
        for made in self._made:
            close_roles({"made": made})

    def sleep(self, **told: bool) -> None:
        """Put the object to sleep, if it was built and can."""
        for made in self._made:
            if sleep := getattr(made, "sleep", None):
                sleep(**told)
