"""What a node function may see of the system: the step, its place among its role's workers, its resource, a log."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import isnan, nan
from typing import Any, Generic, Protocol, TypeVar

_MASK = (1 << 63) - 1


class DeviceKind(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


@dataclass(frozen=True, slots=True)
class Device:
    """Where a worker computes. ``worker`` is the worker's name, which survives a restart; its address does not."""

    worker: str
    kind: DeviceKind = DeviceKind.CPU
    index: int = 0
    """Among those that this worker sees, in its own order."""
    card: str = ""
    """Names an accelerator in all of the run: workers that have the same one share it. Empty on a CPU."""
    shared_by: int = 1
    """Workers of the run that compute on it, this one included."""

    @property
    def torch_name(self) -> str:
        return "cpu" if self.kind is DeviceKind.CPU else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker's place among the workers of one role. ``group`` is their torch process group, None when alone."""

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)
    side_group: Any = field(default=None, compare=False)
    """A gloo group of the same workers, for messages beside those of ``group``; None in a run with one worker."""
    host: str = field(default="127.0.0.1", compare=False)
    """The address at which peers reach the worker, and to which it binds its sockets."""


class Reduce(StrEnum):
    """How the values that the workers logged under one name become the step's one number."""

    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    STD = "std"


@dataclass(slots=True)
class Metric:
    """A mergeable summary of logged values; ``reduce`` says which number it stands for."""

    reduce: Reduce
    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, value: float, weight: float = 1.0) -> None:
        self.weight += weight
        self.total += weight * value
        self.squares += weight * value * value
        self._stretch(value, value)

    def merge(self, other: Metric) -> None:
        """Fold in what another worker logged under the same name. ValueError if it declared another reducer."""
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
        """The reduced number; None when nothing was logged (an empty partition everywhere)."""
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
    """A table that is never whole in memory: a node gives it, or takes it, one piece after the other."""

    index: Any
    """A pa.Table with all rows of the stream, by row id, on each worker; its binary columns are empty."""
    tables: Generator[Any]
    """Tables of the rows that follow in ``index``: a source's hold the rows that it gives of them, perhaps none, a
    sink's all of them. A table's memory is freed when nobody refers to it any more. Or tensors, one a row, where the
    function declares that it handles tensors: all of them, on every worker.
    """


class Peers(Protocol):
    """Collectives among the workers of a role. All of them must call each alike; they have no timeout of their own."""

    def all_sum(self, values: Sequence[float]) -> list[float]: ...

    def all_gather(self, message: bytes) -> list[bytes]: ...


class _NoPeers:
    """The collectives of a worker that is alone in its role."""

    def all_sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def all_gather(self, message: bytes) -> list[bytes]:
        return [message]


def _draws_nothing(count: int) -> Any:
    raise TypeError("this node may not draw more prompts: declare draws=True (@columns(depends_on_options=...))")


@dataclass(slots=True)
class Context:
    """All that a node function may see of the system. One is made for each run of a node."""

    step: int
    run_seed: int
    rank: Rank
    device: Device
    resource: Any
    """What the node's role built on this worker: an engine, a trainer."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What each role of this worker built, by the role's name."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    drain: bool = False
    """No training step follows this one (a validation, a checkpoint or the end does): a node that postpones work to a
    later step finishes it in this one."""
    state: dict[str, Any] = field(default_factory=dict)
    """What the node remembers on this worker from one step to the next. It survives drains, and is empty when a run
    begins or is resumed: it is not part of a checkpoint."""
    draw_prompts: Callable[[int], Any] = field(default=_draws_nothing)
    """``draw_prompts(count)`` gives the dataset's next prompts, shared out over the role's workers, as a table like the
    node's input. All of the role's workers must call it alike. For nodes that declare ``draws=True``."""
    steal_from_peers: Callable[[Sequence[Any], Any], Any] | None = None
    """``steal_from_peers(items, codec)`` makes a work queue of items that idle workers of the role may take over: see
    ``siirl_dask.worker.work_stealing``. None where the role has no other workers. All of them must call it."""
    peers: Peers = field(default_factory=_NoPeers)
    """The collectives behind ``all_sum`` and ``all_gather``."""

    def seed(self, row_id: int) -> int:
        """A 63-bit seed that depends on (run seed, step, row id) alone: the same on any worker."""
        key = f"{self.run_seed}/{self.step}/{row_id}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") & _MASK

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed, in float64, over the workers of the node's role. All of them must call it, rows or not,
        with as many numbers; all get the same bits.
        """
        return self.peers.all_sum(values)

    def all_gather(self, message: bytes) -> list[bytes]:
        """The messages of all workers of the node's role, in the order of ranks. All of them must call it."""
        return self.peers.all_gather(message)

    def free_device(self) -> None:
        """Put the other resources of this worker to sleep, so that this node's has the memory of the device.

        A resource that has a ``sleep()``, such as an engine, wakes by itself when it is used.
        """
        for resource in self.resources.values():
            if resource is not self.resource and (sleep := getattr(resource, "sleep", None)):
                sleep()

    def log(
        self, name: str, values: float | Iterable[float], reduce: Reduce = Reduce.MEAN, weight: float = 1.0
    ) -> None:
        """Log one value, or one per row, under ``name``; ``reduce`` says how all workers' values become one number."""
        metric = self.metrics.setdefault(name, Metric(reduce))
        if metric.reduce is not reduce:
            raise ValueError(f"metric {name!r} was logged with reducer {metric.reduce} and now with {reduce}")
        for value in [values] if isinstance(values, (int, float)) else values:
            metric.add(float(value), weight)


I = TypeVar("I")  # noqa: E741


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Codec(Generic[I, R]):
    """Items and results as plain data and back. What reads raises PeerError for what it does not expect."""

    pack_item: Callable[[I], Any]
    read_item: Callable[[object], I]
    pack_result: Callable[[R], Any]
    read_result: Callable[[object], R]
