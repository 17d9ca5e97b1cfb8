"""Roles whose object is built at its first use: nodes that are run again on stored rows may never ask for a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from siirl_dask.context import Device, Rank
from siirl_dask.planner import Role, RoleCost, builds
from siirl_dask.planner.contract import provides_of


def built_when_used(role: Role) -> Role:
    """Return the role with an object that is built when a node first asks it for anything."""
    return Role(role.name, partial(build_when_used, build=role.build), role.at)


def _provided(options: Mapping[str, Any], workers: Sequence[str], config: object) -> RoleCost:
    """The preflight of ``build_when_used``: nobody knows whether the object will be there, so it is not checked."""
    return RoleCost(memory=0, provides=provides_of(options["build"]))


@builds(preflight=_provided)
def build_when_used(device: Device, rank: Rank, *, build: Callable[..., Any]) -> Any:
    """Return an object that becomes what ``build(device, rank)`` returns."""
    return _WhenUsed(partial(build, device, rank))


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

    def close(self) -> None:
        """Close the object, if it was built."""
        for made in self._made:
            if close := getattr(made, "close", None):
                close()

    def sleep(self) -> None:
        """Put the object to sleep, if it was built and can."""
        for made in self._made:
            if sleep := getattr(made, "sleep", None):
                sleep()
