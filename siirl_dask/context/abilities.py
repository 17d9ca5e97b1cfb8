"""Abilities that the object of a role may have, and that are looked for where they are used."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol, runtime_checkable

from siirl_dask.context.device import Rank


@runtime_checkable
class Sleeps(Protocol):
    """An object that frees memory of the device while others compute there, and wakes by itself
    when it is used.
    """

    def sleep(self, *, weights_follow: bool = False) -> None:
        """Free device memory. With ``weights_follow`` the next call loads weights or adapters:
        nothing but what that needs must be kept. An object that gets no weights of others is never
        called with it.
        """
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """An object whose memory is that of another, which several roles of the worker have in
    common.
    """

    @property
    def shared(self) -> Any:
        """The object in common. Those with the same one stay awake together."""
        ...


@runtime_checkable
class KeepsGroups(Protocol):
    """An object that the next launch of a run can reuse, with other process groups: see
    ``HoldsNoGroups``.
    """

    def leave_groups(self) -> bool:
        """Leave the process groups of the rank; return whether the object can go on with those
        of another rank.
        """
        ...

    def join_groups(self, rank: Rank) -> None:
        """Go on with ``rank``, which has other process groups."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An object that holds memory or processes until it is closed."""

    def close(self) -> None:
        """Free what the object holds; it cannot be used any more."""
        ...


class StandIn(ABC):
    """An object that stands for another, which is built when it is needed."""

    @abstractmethod
    def built(self) -> Any:
        """Return the other object, which is built now if it is not yet."""


def behind(resource: Any) -> Any:
    """Return the object whose abilities are to be looked for: a resource itself, or what it
    stands for, built now.
    """
    return resource.built() if isinstance(resource, StandIn) else resource


def memory_of(resource: Any) -> Any:
    """Return the object whose memory a resource takes: itself, or what it has in common with
    others.
    """
    return resource.shared if isinstance(resource, SharesMemory) else resource
