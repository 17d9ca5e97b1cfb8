"""The device that a worker computes on, its rank among the workers of a role, and the abilities
that the object of a role may have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakValueDictionary

from siirl_dask.devices import DeviceKind

if TYPE_CHECKING:
    from siirl_dask.models.remote import RemoteModel

_S = TypeVar("_S")


def _nothing() -> None:
    pass


def _ignore(count: int) -> None:
    pass


def _ignore_rows(done: int, total: int) -> None:
    pass


def _ignore_cache(used: float, waiting: int) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Device:
    """The device on which a worker computes."""

    worker: str
    """Name of the worker, which survives a restart, unlike its address."""
    kind: DeviceKind = DeviceKind.CPU
    index: int = 0
    """Index among the devices that this worker sees."""
    card: str = ""
    """Name of the accelerator in the whole run: workers with the same name share it. Empty on a
    CPU."""
    shared_by: int = 1
    """Number of workers of the run that compute on it, this one included."""
    memory: int = field(default=0, compare=False)
    """Bytes of the accelerator's memory; 0 on a CPU, and where they are not known."""
    cpus: frozenset[int] = field(default=frozenset(), compare=False)
    """CPUs near the accelerator to which the worker's process is bound; empty where it is not
    bound."""
    cores: int = field(default=1, compare=False)
    """Cores of the host that are this worker's share, for what is computed there while its
    accelerator waits."""
    room: int = field(default=0, compare=False)
    """Bytes of them for a role that takes what others leave, such as an engine; 0 where that is
    not known."""
    fill: int = field(default=0, compare=False)
    """Bytes of these for the part of it that grows: an engine's cache."""
    pci: str = field(default="", compare=False)
    """Kernel and PCI address of the accelerator, ``<boot id>/0000:3b:00.0``; empty where they
    are not known."""
    progress: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """To be called, from any thread, whenever something got done: a sample, a micro-batch, a row.
    Silence of all workers for ``cluster.stall_timeout`` ends a run, and no step is too long."""
    stage: Callable[[str], AbstractContextManager[object]] = field(
        default=nullcontext,
        compare=False,
        repr=False,
    )
    """``with device.stage("the loading of weights"):`` names a part of what a role's build does,
    for those who wait."""
    bind: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """Makes it the current device of the calling thread, which a thread that a role starts must
    do itself."""
    waiting: Callable[[], AbstractContextManager[object]] = field(
        default=nullcontext,
        compare=False,
        repr=False,
    )
    """``with device.waiting():`` says that what is inside waits for other workers, as a collective
    does. The run's trace tells it from computing."""
    engine_has: Callable[[int], None] = field(default=_ignore, compare=False, repr=False)
    """To be called with the number of requests that this worker's engine has under way, when it
    changes."""
    engine_cache: Callable[[float, int], None] = field(
        default=_ignore_cache,
        compare=False,
        repr=False,
    )
    """``engine_cache(used, waiting)``: to be called by an engine whose KV cache is bounded with the
    share of it that is in use, and with the number of its requests that wait for room in it."""
    sampled: Callable[[int, int], None] = field(default=_ignore_rows, compare=False, repr=False)
    """``sampled(done, total)``: to be called with the number of samples or episodes of a node that
    this worker has completed, those of peers included, and with the number of its own, when either
    changes."""
    models: Mapping[str, RemoteModel] = field(default_factory=dict, compare=False, repr=False)
    """Models at URLs, by URL, as they were when the run began: see ``siirl_dask.models.cache``."""
    held: MutableMapping[Hashable, Any] = field(
        default_factory=WeakValueDictionary,
        compare=False,
        repr=False,
    )
    """Objects that several roles of this worker hold together; gone when none of them does any
    more: see ``shared``."""

    @property
    def gpu(self) -> str:
        """Name of the whole accelerator in the run: slices of one GPU (MIG) have it in common,
        and a card each.
        """
        if self.pci:
            return self.pci
        return self.card

    @property
    def torch_name(self) -> str:
        """Name of the device for torch, such as ``cuda:0``."""
        if self.kind is DeviceKind.CPU:
            return "cpu"
        return f"{self.kind}:{self.index}"

    def shared(self, name: Hashable, make: Callable[[], _S]) -> _S:
        """Return the object that roles of this worker hold together by ``name``; the first to
        ask makes it.
        """
        found: _S | None = self.held.get(name)
        if found is None:
            found = self.held[name] = make()
        return found


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's rank among the ``size`` workers of one role."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)
    """Torch process group of these workers; None for a worker that is alone."""
    side_group: Any = field(default=None, compare=False)
    """Gloo group of the same workers, for messages beside those of ``group``; None in a run with
    one worker."""
    host: str = field(default="127.0.0.1", compare=False)
    """Address at which peers reach the worker, and to which it binds its sockets."""
    cpu_group: Any = field(default=None, compare=False)
    """Gloo group of the same workers, for small sums and messages among the calls of ``group``.
    None stands for ``group`` itself, which is gloo then."""

    def __post_init__(self) -> None:
        if self.cpu_group is None:
            object.__setattr__(self, "cpu_group", self.group)


class HoldsNoGroups:
    """Base of the objects of roles that hold no process group, and nothing from step to step but
    their ``state()``.

    When another worker of the run is lost, an object that has these two methods stays as it is and
    only its state is loaded; others are built anew. All workers of a role must be able to build one
    without the others.
    """

    def leave_groups(self) -> bool:
        """Let go of the process groups of the rank; return whether the object can go on with
        those of another rank.
        """
        return True

    def join_groups(self, rank: Rank) -> None:
        """Go on with ``rank``, which has other process groups; in an elastic run also another
        number, or more ranks or fewer beside it.
        """


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
    if isinstance(resource, StandIn):
        return resource.built()
    return resource


def memory_of(resource: Any) -> Any:
    """Return the object whose memory a resource takes: itself, or what it has in common with
    others.
    """
    if isinstance(resource, SharesMemory):
        return resource.shared
    return resource
