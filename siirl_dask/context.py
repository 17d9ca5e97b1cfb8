"""The context of a node function: the step, the worker's rank in its role, the role's resource, collectives, a log."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import isnan, nan
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from siirl_dask.models.remote import RemoteModel

_MASK = (1 << 63) - 1


class DeviceKind(StrEnum):
    """Kind of a worker's device."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


def _nothing() -> None:
    pass


def _ignore(count: int) -> None:
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
    """Name of the accelerator in the whole run: workers with the same name share it. Empty on a CPU."""
    shared_by: int = 1
    """Number of workers of the run that compute on it, this one included."""
    memory: int = field(default=0, compare=False)
    """Bytes of the accelerator's memory; 0 on a CPU, and where they are not known."""
    room: int = field(default=0, compare=False)
    """Bytes of them for a role that takes what others leave, such as an engine; 0 where that is not known."""
    fill: int = field(default=0, compare=False)
    """Bytes of these for the part of it that grows: an engine's cache."""
    progress: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """To be called, from any thread, whenever something got done: a sample, a micro-batch, a row. Silence of all
    workers for ``cluster.stall_timeout`` ends a run, and no step is too long."""
    stage: Callable[[str], AbstractContextManager[object]] = field(default=nullcontext, compare=False, repr=False)
    """``with device.stage("the loading of weights"):`` names a part of what a role's build does, for those who wait."""
    bind: Callable[[], None] = field(default=_nothing, compare=False, repr=False)
    """Makes it the current device of the calling thread, which a thread that a role starts must do itself."""
    waiting: Callable[[], AbstractContextManager[object]] = field(default=nullcontext, compare=False, repr=False)
    """``with device.waiting():`` says that what is inside waits for other workers, as a collective does. The run's
    trace tells it from computing."""
    engine_has: Callable[[int], None] = field(default=_ignore, compare=False, repr=False)
    """To be called with the number of requests that this worker's engine has under way, when it changes."""
    models: Mapping[str, RemoteModel] = field(default_factory=dict, compare=False, repr=False)
    """Models at URLs, by URL, as they were when the run began: see ``siirl_dask.models.cache``."""

    @property
    def torch_name(self) -> str:
        """Name of the device for torch, such as ``cuda:0``."""
        return "cpu" if self.kind is DeviceKind.CPU else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's rank among the ``size`` workers of one role."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)
    """Torch process group of these workers; None for a worker that is alone."""
    side_group: Any = field(default=None, compare=False)
    """Gloo group of the same workers, for messages beside those of ``group``; None in a run with one worker."""
    host: str = field(default="127.0.0.1", compare=False)
    """Address at which peers reach the worker, and to which it binds its sockets."""
    cpu_group: Any = field(default=None, compare=False)
    """Gloo group of the same workers, for small sums and messages among the calls of ``group``. None stands for
    ``group`` itself, which is gloo then."""

    def __post_init__(self) -> None:
        if self.cpu_group is None:
            object.__setattr__(self, "cpu_group", self.group)


class HoldsNoGroups:
    """Base of the objects of roles that hold no process group, and nothing from step to step but their ``state()``.

    When another worker of the run is lost, an object that has these two methods stays as it is and only its state is
    loaded; others are built anew. All workers of a role must be able to build one without the others.
    """

    def leave_groups(self) -> bool:
        """Let go of the process groups of the rank; return whether the object can go on with those of another rank."""
        return True

    def join_groups(self, rank: Rank) -> None:
        """Go on with ``rank``, which has other process groups; in an elastic run also another number, or more ranks or
        fewer beside it.
        """


class Reduce(StrEnum):
    """Reduction of the values that all workers logged under one name to the step's number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"


@dataclass(slots=True)
class Metric:
    """A mergeable summary of logged values; ``reduce`` chooses the number that it yields."""

    reduce: Reduce
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self.weight += weight
        self.total += weight * value
        self.squares += weight * value * value
        self._stretch(value, value)

    def merge(self, other: Metric) -> None:
        """Add the values that another worker logged under the same name. ValueError if its reducer differs."""
        if other.reduce is not self.reduce:
            raise ValueError(f"logged with reducer {self.reduce} and with {other.reduce}: choose one")
        self.weight += other.weight
        self.total += other.total
        self.squares += other.squares
        self._stretch(other.low, other.high)

    def _stretch(self, low: float, high: float) -> None:
        bad = any(map(isnan, (low, high, self.low, self.high)))  # min() and max() would hide a nan
        self.low = nan if bad else min(self.low, low)
        self.high = nan if bad else max(self.high, high)

    @property
    def value(self) -> float | None:
        """The reduced number; None if nothing was logged, as with empty partitions everywhere."""
        if self.weight == 0:
            return None
        match self.reduce:
            case Reduce.MEAN:
                return self.total / self.weight
            case Reduce.SUM:
                return self.total
            case Reduce.MAX:
                return self.high
            case Reduce.MIN:
                return self.low
            case Reduce.STD:
                mean = self.total / self.weight
                return float(max(self.squares / self.weight - mean * mean, 0.0) ** 0.5)


@dataclass(frozen=True, slots=True)
class RowStream:
    """A table that is never whole in memory: a node gives or takes it piece by piece."""

    index: Any
    """A pa.Table with all rows of the stream, in the order of row ids, the same on each worker; its binary columns are
    empty."""
    tables: Generator[Any]
    """Tables of consecutive rows of ``index``. A source's tables hold this worker's share of these rows, perhaps none;
    a sink's hold all. A table's memory is freed with its last reference. For a function that handles tensors,
    these are tensors instead, one for each row, on every worker.
    """


class Peers(Protocol):
    """Collectives among the workers of a role. All workers must call each alike; there is no timeout here."""

    def all_sum(self, values: Sequence[float]) -> list[float]: ...

    def all_gather(self, message: bytes) -> list[bytes]: ...


class _NoPeers:
    """Collectives of a worker that is alone in its role."""

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def all_gather(self, message: bytes) -> list[bytes]:
        return [message]


class RowWork(Protocol):
    """Work of a node on single rows, which has begun while other rows are still made."""

    def take(self, rows: Any) -> None:
        """Begin with finished rows: a pa.Table with the columns that the node reads, and their ids. Returns at once.

        Any thread may call it.
        """

    def cancel(self) -> None:
        """End what is under way. Called when the node is done as well, and when it never gets its turn."""


def _keeps_nothing(rows: Any) -> str | None:
    return None


def _draws_nothing(count: int) -> Any:
    raise TypeError("this node may not draw more prompts: declare draws=True (@columns(depends_on_options=...))")


@dataclass(slots=True)
class Context:
    """The part of the system that a node function sees. Each run of a node gets a new one."""

    step: int
    run_seed: int
    rank: Rank
    device: Device
    resource: Any
    """Object that the node's role built on this worker, such as an engine or a trainer."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """Objects of all roles on this worker, by the role's name."""
    reloaded: frozenset[str] = frozenset()
    """Roles of this worker that get new weights, all of them, before any other node of theirs runs."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    drain: bool = False
    """True if no training step follows at once, but a validation, a checkpoint or the end: a node that postpones work
    to a later step must finish it in this one."""
    state: dict[str, Any] = field(default_factory=dict)
    """The node's memory on this worker from one step to the next. It survives drains. It is empty when a run begins or
    resumes, since no checkpoint holds it; rows in it come back that the node declares (``KeptRows``) and a step has
    stored."""
    draw_prompts: Callable[[int], Any] = field(default=_draws_nothing)
    """``draw_prompts(count)`` returns this worker's share of the dataset's next prompts, as a table like the node's
    input. All workers of the role must call it alike. Only for nodes that declare ``draws=True``."""
    steal_from_peers: Callable[..., Any] | None = None
    """``steal_from_peers(items, codec, on_result=None)`` returns a work queue of items that idle workers of the role
    may take over, and calls ``on_result(number, result)`` for each; see ``siirl_dask.worker.work_stealing``. All
    workers must call it. None for a role with one worker."""
    hand_over: Callable[[Any], None] | None = None
    """``hand_over(rows)`` lets rows go on while the node makes others: a table of their ids, groups, and the columns
    that the node declares ``early``, all as they will be in its output, and any of its others. Any thread may call it,
    once for each row at most. None where nothing is gained by it."""
    overlap: bool = False
    """Whether work on finished rows may begin while others are made (``run.overlap``): for a node that does both."""
    begun: Any = None
    """RowWork that the node has begun with finished rows (``@columns(by_row=...)``); None where it has not."""
    skip_nonfinite: bool = False
    """Whether an optimizer step on numbers that are not finite is left out (``run.on_nan=skip``), or ends the run."""
    put_aside: Callable[[Any], str | None] = _keeps_nothing
    """``put_aside(rows)`` writes a table, for people to look at, as this worker's part of ``nonfinite-NODE`` in the
    run's folder, and returns the folder of the step; None where it was not written. Each call replaces the one before.
    """
    peers: Peers = field(default_factory=_NoPeers)
    """Collectives behind ``all_sum`` and ``all_gather``."""

    def seed(self, row_id: int) -> int:
        """Return a 63-bit seed of (run seed, step, row id), which is the same on any worker."""
        key = f"{self.run_seed}/{self.step}/{row_id}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") & _MASK

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each number, in float64, over the workers of the node's role; all get the same bits.

        All workers must call it with as many numbers, even those without rows.
        """
        return self.peers.all_sum(values)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all workers of the node's role, in rank order. All of them must call it."""
        return self.peers.all_gather(message)

    def free_device(self) -> None:
        """Put the other resources of this worker to sleep, so that this node's has the memory of the device.

        A resource that has a ``sleep()``, such as an engine or a trainer, wakes by itself when it is used. One that
        gets new weights before it is used again is told so (``weights_follow=True``): it need not keep those it has.
        """
        for role, resource in self.resources.items():
            if resource is not self.resource and (sleep := getattr(resource, "sleep", None)):
                sleep(**{"weights_follow": True} if role in self.reloaded else {})

    def log(
        self, name: str, values: float | Iterable[float], reduce: Reduce = Reduce.MEAN, weight: float = 1.0
    ) -> None:
        """Log one value, or one per row, under ``name``; ``reduce`` makes one number of all workers' values."""
        metric = self.metrics.setdefault(name, Metric(reduce))
        if metric.reduce is not reduce:
            raise ValueError(f"metric {name!r} was logged with reducer {metric.reduce} and now with {reduce}")
        for value in [values] if isinstance(values, (int, float)) else values:
            metric.add(float(value), weight)


I = TypeVar("I")  # noqa: E741


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Codec(Generic[I, R]):
    """Converts items and results to plain data and back. The read functions raise PeerError for unexpected data."""

    pack_item: Callable[[I], Any]
    read_item: Callable[[object], I]
    pack_result: Callable[[R], Any]
    read_result: Callable[[object], R]
