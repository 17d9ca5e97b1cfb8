"""The context of a node function: the step, the worker's rank in its role, the role's resource,
collectives, a log.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from math import isnan, nan
from typing import Any, Generic, Protocol, TypeVar

from siirl_dask.context.device import Device, Rank, Sleeps, memory_of


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
        """Add the values that another worker logged under the same name. ValueError if its
        reducer differs.
        """
        if other.reduce is not self.reduce:
            raise ValueError(
                f"logged with reducer {self.reduce} and with {other.reduce}: choose one"
            )
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


_I = TypeVar("_I")
_R = TypeVar("_R")
_MASK = (1 << 63) - 1
TOTALS = ("samples", "tokens")
"""Metrics that also count for the run as a whole where a node logs them for an agent."""


@dataclass(frozen=True, slots=True)
class RowStream:
    """A table that is never whole in memory: a node gives or takes it piece by piece."""

    index: Any
    """A pa.Table with all rows of the stream, in the order of row ids, the same on each worker; its
    binary columns are empty."""
    tables: Generator[Any]
    """Tables of consecutive rows of ``index``. A source's tables hold this worker's share of these
    rows, perhaps none; a sink's hold all. A table's memory is freed with its last reference. For a
    function that handles tensors, these are tensors instead, one for each row, on every worker.
    """


class Peers(Protocol):
    """Collectives among the workers of a role. All workers must call each alike; there is no
    timeout here.
    """

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
        """Begin with finished rows: a pa.Table with the columns that the node reads, and their ids.
        Returns at once.

        Any thread may call it.
        """

    def cancel(self) -> None:
        """End what is under way. Called when the node is done as well, and when it never gets
        its turn.
        """


class ArrivingWeights(Protocol):
    """New weights of a node's role that may arrive while the node runs. The node's thread calls
    it.
    """

    def arrived(self) -> bool:
        """Return whether ``load`` need not wait for anybody: weights are here that are not loaded
        yet, or cannot come any more, and ``load`` raises the reason. Returns at once.
        """
        ...

    def load(self) -> None:
        """Load the weights that have arrived into the role's object, by its own method."""
        ...


def _nothing() -> None:
    pass


def _keeps_nothing(rows: Any) -> str | None:
    return None


def _draws_nothing(count: int) -> Any:
    raise TypeError(
        "this node may not draw more prompts: declare draws=True (@columns(depends_on_options=...))"
    )


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
    """Roles of this worker that get new weights, all of them, before any other node of theirs
    runs."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    drain: bool = False
    """True if no training step follows at once, but a validation, a checkpoint or the end: a node
    that postpones work to a later step must finish it in this one."""
    state: dict[str, Any] = field(default_factory=dict)
    """The node's memory on this worker from one step to the next. It survives drains. It is empty
    when a run begins or resumes, since no checkpoint holds it; rows in it come back that the node
    declares (``KeptRows``) and a step has stored."""
    draw_prompts: Callable[[int], Any] = field(default=_draws_nothing)
    """``draw_prompts(count)`` returns this worker's share of the dataset's next prompts, as a table
    like the node's input. All workers of the role must call it alike. Only for nodes that declare
    ``draws=True``."""
    steal_from_peers: Callable[..., Any] | None = None
    """``steal_from_peers(items, codec, on_result=None)`` returns a work queue of items that idle
    workers of the role may take over, and calls ``on_result(number, result)`` for each; see
    ``siirl_dask.worker.peers.work_stealing``. All workers must call it. None for a role with one worker.
    """
    hand_over: Callable[[Any], None] | None = None
    """``hand_over(rows)`` lets rows go on while the node makes others: a table of their ids,
    groups, and the columns that the node declares ``early``, all as they will be in its output, and
    any of its others. Any thread may call it, once for each row at most. None where nothing is
    gained by it."""
    arriving_weights: ArrivingWeights | None = None
    """New weights of the role's object that the node may load while it runs; None for a node that
    does not (``ContractChanges.in_flight``)."""
    check_stop: Callable[[], None] = field(default=_nothing)
    """Raises Aborted when this worker is told to stop: for a node that waits for others than
    workers of the run."""
    overlap: bool = False
    """Whether work on finished rows may begin while others are made (``run.overlap``): for a
    node that does both."""
    begun: Any = None
    """RowWork that the node has begun with finished rows (``@columns(by_row=...)``); None where
    it has not."""
    skip_nonfinite: bool = False
    """Whether an optimizer step on numbers that are not finite is left out
    (``run.on_nan=skip``), or ends the run."""
    dump_nonfinite: Callable[[Any], str | None] = _keeps_nothing
    """``dump_nonfinite(rows)`` writes a table, for people to look at, as this worker's part of
    ``nonfinite-NODE`` in the run's folder, and returns the folder of the step; None where it was
    not written. Each call replaces the one before.
    """
    agent: str = ""
    """Agent that the node works for, whose name its metrics begin with; empty where it works for
    all."""
    node: str = ""
    """Name of the node."""
    peers: Peers = field(default_factory=_NoPeers)
    """Collectives behind ``all_sum`` and ``all_gather``."""

    def seed(self, row_id: int) -> int:
        """Return a 63-bit seed of (run seed, step, row id), which is the same on any worker.

        A node that works for an agent has seeds of its own: turns of one episode share a row id,
        not their luck.
        """
        key = (
            f"{self.run_seed}/{self.step}/{row_id}{f'/{self.node}' if self.agent else ''}".encode()
        )
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") & _MASK

    def all_sum(self, values: Sequence[float]) -> list[float]:
        """Sum each number, in float64, over the workers of the node's role; all get the same bits.

        All workers must call it with as many numbers, even those without rows.
        """
        return self.peers.all_sum(values)

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all workers of the node's role, in rank order. All of them must
        call it.
        """
        return self.peers.all_gather(message)

    def free_device(self) -> None:
        """Put the other resources of this worker to sleep, so that this node's has the memory of
        the device.

        A resource that ``Sleeps``, such as an engine or a trainer, wakes by itself when it is used.
        One that gets new weights before it is used again is called with ``weights_follow=True``: it
        need not keep those it has. Resources with the same ``shared`` object (``SharesMemory``)
        stay awake together.
        """
        own = memory_of(self.resource)
        for role, resource in self.resources.items():
            if memory_of(resource) is own or not isinstance(resource, Sleeps):
                continue
            if role in self.reloaded:
                resource.sleep(weights_follow=True)
            else:
                resource.sleep()

    def log(
        self,
        name: str,
        values: float | Iterable[float],
        reduce: Reduce = Reduce.MEAN,
        weight: float = 1.0,
    ) -> None:
        """Log one value, or one per row, under ``name``; ``reduce`` makes one number of all
        workers' values.

        A node that works for agent ``a`` logs ``a/name``; what is in ``TOTALS`` counts under its
        own name as well.
        """
        given = [values] if isinstance(values, (int, float)) else list(values)
        names = []
        if self.agent:
            names.append(f"{self.agent}/{name}")
        if not self.agent or name in TOTALS:
            names.append(name)
        for logged in names:
            metric = self.metrics.setdefault(logged, Metric(reduce))
            if metric.reduce is not reduce:
                raise ValueError(
                    f"metric {logged!r} was logged with reducer {metric.reduce} and now with "
                    f"{reduce}"
                )
            for value in given:
                metric.add(float(value), weight)


@dataclass(frozen=True, slots=True)
class Codec(Generic[_I, _R]):
    """Converts items and results to plain data and back. The read functions raise PeerError for
    unexpected data.
    """

    pack_item: Callable[[_I], Any]
    read_item: Callable[[object], _I]
    pack_result: Callable[[_R], Any]
    read_result: Callable[[object], _R]
    renewed: Callable[[], Codec[_I, _R]] | None = None
    """Makes the codec of one message, where items may refer to what was in those before them;
    None: they do not."""

    def of_message(self) -> Codec[_I, _R]:
        """Return the codec of one message's items, packed or read in the message's order."""
        if self.renewed is None:
            return self
        return self.renewed()
