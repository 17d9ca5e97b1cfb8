"""Roles whose object is built at its first use: nodes that are run again on stored rows may
never use a model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from siirl_dask.context import Device, Rank, Sleeps, StandIn, memory_of
from siirl_dask.planner import Role, RoleCost, builds, provides_of, specs_of
from siirl_dask.worker.roles.role_state import (
    ResumeFrom,
    RoleStates,
    StateStore,
    close_roles,
    has_state,
)


@dataclass(frozen=True, slots=True)
class StoredStates:
    """The states of a run's roles in a checkpoint, which their objects load when they are built."""

    checkpoint: ResumeFrom
    store: StateStore
    verify: Callable[[Collection[str]], None]
    """Compares the files of some roles with their digests; raises CheckpointError."""

    def restore(self, name: str, resource: Any, rank: Rank) -> None:
        """Load the state of the role ``name`` into its object, if that has one; all its workers
        call this alike.
        """
        if not has_state(resource):
            return
        if rank.rank == 0 and name in self.checkpoint.roles:
            self.verify([name])
        RoleStates(self.store, {name: resource}, {name: rank.side_group}).restore(self.checkpoint)


def built_when_used(role: Role, stored: StoredStates | None = None) -> Role:
    """Return the role with an object that is built, and loads its state, when a node first uses
    it.
    """
    return Role(
        role.name,
        partial(build_when_used, name=role.name, build=role.build, stored=stored),
        role.at,
    )


def _preflight(options: Mapping[str, Any], workers: Sequence[str], config: object) -> RoleCost:
    """Return no memory, since nobody knows whether the object will be built."""
    return RoleCost(memory=0, provides=provides_of(options["build"]))


def _specs(options: Mapping[str, Any]) -> Mapping[str, object]:
    return specs_of(options["build"])


@builds(preflight=_preflight, specs=_specs)
def build_when_used(
    device: Device,
    rank: Rank,
    *,
    name: str,
    build: Callable[..., Any],
    stored: StoredStates | None = None,
) -> Any:
    """Return an object that becomes what ``build(device, rank)`` returns, with its stored state."""

    def make() -> Any:
        resource = build(device, rank)
        try:
            if stored is not None:
                stored.restore(name, resource, rank)
        except Exception:
            close_roles({name: resource})
            raise
        return resource

    return _LazyResource(make)


def models_used(resources: Mapping[str, Any]) -> list[str]:
    """Return the roles, among those that are built when they are used, whose objects are built
    and have a state.
    """
    built = {
        name: lazy._built for name, lazy in resources.items() if isinstance(lazy, _LazyResource)
    }
    return sorted(name for name, objects in built.items() if any(map(has_state, objects)))


class _LazyResource(StandIn):
    """Stands for an object until one of its attributes is used."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._built: list[Any] = []
        """The object, once it is built."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the object, which is built now if it is not yet."""
        return getattr(self.built(), name)

    def built(self) -> Any:
        """Return the object, which is built now if it is not yet."""
        if not self._built:
            self._built.append(self._make())
        return self._built[0]

    @property
    def shared(self) -> Any:
        """The object whose memory this one takes, if it was built: see ``Context.free_device``."""
        return memory_of(self._built[0]) if self._built else self

    def close(self) -> None:
        """Close the object, if it was built."""
        if self._built:
            close_roles({"built": self._built[0]})

    def sleep(self, **options: bool) -> None:
        """Put the object to sleep, if it was built and has ``sleep``."""
        for built in self._built:
            if isinstance(built, Sleeps):
                built.sleep(**options)
