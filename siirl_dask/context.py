"""What a node function may see of the system: the step, its place among its role's workers, its resource, a log."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import isnan, nan
from typing import Any

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
    sharers: int = 1
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
    beside: Any = field(default=None, compare=False)
    """A gloo group of the same workers, for what goes on beside their work; None in a run with one worker."""
    host: str = field(default="127.0.0.1", compare=False)
    """What the worker itself is reached at, and binds its sockets to."""


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
class Parts:
    """A table that is never there as a whole. Its makers give it and its reader takes it one part after the other."""

    about: Any
    """The whole table's rows, by row id, all of them on each worker; binary columns are empty."""
    tables: Generator[Any]
    """Each holds the rows that follow in ``about``: a maker's those that it gives of them, which may be none, a
    reader's all. A part's memory is given back when it is let go of. Or tensors, one a row, where a function declares
    ``gives_tensors`` or ``takes_tensors``: all of them, on any worker.
    """


def _no_more(count: int) -> Any:
    raise TypeError("this node may not draw more prompts: declare draws=True in its @columns")


@dataclass(slots=True)
class Context:
    """All a node function may see. One is made for each run of a node."""

    step: int
    run_seed: int
    rank: Rank
    device: Device
    resource: Any
    """What the node's role built on this worker: an engine, a trainer."""
    resources: Mapping[str, Any] = field(default_factory=dict)
    """What each role of this worker built, by its name."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    more: Callable[[int], Any] = field(default=_no_more)
    """As many more prompts, shared out over the role's workers, as a table like the node's input; positions go on. All
    of the workers must call it alike. For nodes that declare ``draws=True``.
    """
    sum_over_workers: Callable[[Sequence[float]], list[float]] = list
    settles: bool = False
    """Something else than training comes next: what a node keeps for a later step has to be done in this one."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What the node keeps on this worker from one step to the next. Empty when a run begins or goes on."""
    share: Callable[[Sequence[Any], Any], Any] | None = None
    """Makes items of work, and a codec for them, what the workers of the node's role may take over from one another:
    see ``siirl_dask.coordinator.stealing``. None where there are no others. All of them must call it, items or not.
    """

    def seed(self, row_id: int) -> int:
        """A 63-bit seed that depends on (run seed, step, row id) alone: the same on any worker."""
        key = f"{self.run_seed}/{self.step}/{row_id}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") & _MASK

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed, in float64, over the workers of the node's role. All of them must call it, rows or not,
        with as many numbers; all get the same bits.
        """
        return self.sum_over_workers(values)

    def log(
        self, name: str, values: float | Iterable[float], reduce: Reduce = Reduce.MEAN, weight: float = 1.0
    ) -> None:
        """Log one value, or one per row, under ``name``; ``reduce`` says how all workers' values become one number."""
        metric = self.metrics.setdefault(name, Metric(reduce))
        if metric.reduce is not reduce:
            raise ValueError(f"metric {name!r} was logged with reducer {metric.reduce} and now with {reduce}")
        for value in [values] if isinstance(values, (int, float)) else values:
            metric.add(float(value), weight)
