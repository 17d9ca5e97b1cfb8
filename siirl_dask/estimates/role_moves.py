"""Seconds for which memory of a worker's roles moves in a step, since they use its accelerator one after the other.

The moves follow from the worker's nodes, as they do in a run: a node that generates, scores or learns puts the other
roles to sleep (``Context.free_device``), and a role wakes when it is used.

    sleeps    an engine gives its memory back; graphs, and weights unless new ones follow, go to the host's memory
    wakes     the same memory is taken again, and what the host has comes back
    parks     with trainer.park: weights after an update, moments and averages after an update, to the host's memory
    returns   the same back, before a pass or an update
    gathers   messages of 16 MiB in which the weights of a sharded model are gathered
    reloads   each tensor that an engine's loader takes

Bytes go at the rate of the device's link to its host, of which all devices of a host together have no more than the
host's memory gives. Where the workers of a host are not known, they are eight, as in the systems of the data sheets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from siirl_dask.estimates.speeds import Speed
from siirl_dask.planner import Node
from siirl_dask.schema import PARAMETER_DATA

_CARDS = 8  # of a host
# bytes a second that the driver gives or takes back in pieces of 2 MiB; by habit, not measured
_MAPPED = 200e9
# seconds of Python and small kernels for each tensor that an engine reloads, with its layer
_TENSOR = 3e-3
_MESSAGE = 0.5e-3  # seconds of Python and launching for each message of a gather
_BUCKET = 16 * 2**20  # bytes of a message
Moves = dict[str, dict[str, float]]
"""Seconds by node and, within it, by the kind of move: ``{"rollout": {"policy parks": 0.1,
"rollout wakes": 0.3}}``."""


@dataclass(kw_only=True, slots=True)
class SleepingEngine:
    """An engine on a worker: its bytes there, and which of them are awake."""

    role: str
    weights: float
    cache: float
    graphs: float
    """Bytes of the graphs' pool, which the host keeps while the engine sleeps."""
    forgets: bool
    """Whether it drops weights where new ones follow; else the host stores them."""
    tensors: int
    """Tensors of new weights; 0 where it gets adapters alone."""
    weights_awake: bool = True
    cache_awake: bool = True
    on_host: bool = False
    """Whether the host has the weights."""

    def sleep(self, *, weights_follow: bool) -> _Moved | None:
        """Sleep; return the bytes that move, None where it sleeps already."""
        if not self.weights_awake:
            return None
        self.on_host = not (self.forgets and weights_follow)
        copied = self.graphs + (self.weights if self.on_host else 0.0)
        mapped = self.weights + self.graphs + (self.cache if self.cache_awake else 0.0)
        self.weights_awake = False
        self.cache_awake = False
        return _Moved(copied, mapped)

    def wake(self, *, cache: bool) -> _Moved | None:
        """Wake the weights, and the ``cache`` as well to generate; return the bytes that move,
        None for nothing.
        """
        moved = _Moved()
        if not self.weights_awake:
            moved = _Moved(
                self.graphs + (self.weights if self.on_host else 0.0), self.weights + self.graphs
            )
            self.weights_awake = True
        if cache and not self.cache_awake:
            moved = _Moved(moved.copied, moved.mapped + self.cache)
            self.cache_awake = True
        if moved.mapped:
            return moved
        return None


@dataclass(kw_only=True, slots=True)
class ParkedModel:
    """A trained or scoring model on a worker: its bytes there, and which of them are on the
    device.
    """

    role: str
    weights: float
    state: float
    """Bytes of moments and averages; 0 for a model that does not learn."""
    parks: bool
    messages: float
    """Messages in which its weights are gathered; 0 where it is whole on each worker."""
    weights_here: bool = True
    state_here: bool = True
    changed: bool = True
    """Whether weights differ from the host's copy."""

    def rest(self) -> _Moved | None:
        """Park; return the bytes that move, None for nothing. Unchanged weights are not copied
        again.
        """
        if not self.parks:
            return None
        copied = 0.0
        if self.weights_here and self.changed:
            copied += self.weights
        if self.state_here:
            copied += self.state
        self.weights_here = False
        self.state_here = False
        self.changed = False
        if copied:
            return _Moved(copied)
        return None

    def score(self) -> _Moved | None:
        """Fetch the weights; return the bytes that move, None for nothing."""
        if self.weights_here:
            return None
        self.weights_here = True
        return _Moved(self.weights)

    def begin_update(self) -> _Moved | None:
        """Fetch all; return the bytes that move, None for nothing."""
        copied = 0.0
        if not self.weights_here:
            copied += self.weights
        if not self.state_here:
            copied += self.state
        self.weights_here = True
        self.state_here = True
        if copied:
            return _Moved(copied)
        return None

    def end_update(self) -> _Moved | None:
        """Park the state again; return the bytes that move. The weights stay, and have changed."""
        self.changed = True
        if not self.parks:
            return None
        self.state_here = False
        return _Moved(self.state)


@dataclass(frozen=True, slots=True)
class _Moved:
    copied: float = 0.0
    """Bytes between the device and its host."""
    mapped: float = 0.0
    """Bytes of device memory that are taken or given back."""


@dataclass(frozen=True, slots=True)
class NodeWork:
    """A node of a worker, and what it does to the worker's memory."""

    node: Node
    computes: bool
    """Whether it generates, scores or learns, and so has the device for its role."""
    learns: bool


@dataclass(slots=True)
class WorkerMoves:
    """The moves of one worker's roles, step after step."""

    speed: Speed
    workers: int
    """Workers of the run."""
    works: Sequence[NodeWork]
    """The worker's nodes, in the order in which it runs them."""
    engines: Sequence[SleepingEngine]
    models: Sequence[ParkedModel]
    _found: Moves = field(default_factory=dict)

    def seconds(self) -> Moves:
        """Return the seconds of any step after the first."""
        for _ in range(2):
            self._found = {}
            for at, work in enumerate(self.works):
                self._run(at, work)
        return self._found

    def _run(self, at: int, work: NodeWork) -> None:
        name = work.node.name
        role = work.node.role
        if work.computes:
            self._free(at, name, role)
        for engine in self.engines:
            if engine.role != role:
                continue
            loads = PARAMETER_DATA in work.node.contract.reads
            if work.computes or loads:
                self._note(name, f"{role} wakes", engine.wake(cache=work.computes))
            if loads and engine.tensors:
                self._add(name, f"{role} reloads", engine.tensors * _TENSOR)
                engine.on_host = False
        for model in self.models:
            if model.role != role:
                continue
            if work.learns:
                self._note(name, f"{role} returns", model.begin_update())
                self._note(name, f"{role} parks", model.end_update())
                continue
            publishes = PARAMETER_DATA in work.node.contract.writes.names
            if work.computes or publishes:
                self._note(name, f"{role} returns", model.score())
            if publishes and model.messages:
                self._add(name, f"{role} gathers", model.messages * _MESSAGE)

    def _free(self, at: int, name: str, role: str) -> None:
        """Put the other roles to sleep before the node ``name``, the worker's node number
        ``at``.
        """
        for engine in self.engines:
            if engine.role != role:
                follow = self._weights_follow(at, engine.role)
                self._note(name, f"{engine.role} sleeps", engine.sleep(weights_follow=follow))
        for model in self.models:
            if model.role != role:
                self._note(name, f"{model.role} parks", model.rest())

    def _weights_follow(self, at: int, role: str) -> bool:
        """Return whether the next node of the role in the step surely loads weights: see
        ``planner/chain.py``.
        """
        for work in self.works[at + 1 :]:
            if work.node.role == role:
                if work.node.lag:
                    return False
                return work.node.weight_sink is not None
        return False

    def _note(self, node: str, kind: str, moved: _Moved | None) -> None:
        if moved is not None:
            self._add(node, kind, moved.copied / self._rate() + moved.mapped / _MAPPED)

    def _add(self, node: str, kind: str, seconds: float) -> None:
        own = self._found.setdefault(node, {})
        own[kind] = own.get(kind, 0.0) + seconds

    def _rate(self) -> float:
        """Return the bytes a second between a device and its host while all devices of the host
        copy.
        """
        speed = self.speed
        return speed.copying * min(speed.host_link, speed.host_memory / min(self.workers, _CARDS))


def messages_of(nbytes: float) -> float:
    """Return the number of messages in which so many bytes are gathered."""
    return -(-nbytes // _BUCKET)


def slowest(moves_of_workers: Iterator[Moves]) -> Moves:
    """Return for each node the seconds on the worker where they are most."""
    found: Moves = {}
    for moves in moves_of_workers:
        for node, own in moves.items():
            if sum(own.values()) > sum(found.get(node, {}).values()):
                found[node] = own
    return found
