"""Nodes with a lag: the earlier iterations whose rows they take, and weights that arrive before
their place in the chain.

A node with a lag loads weights some steps after they were made, at its place in the chain. A node
of its role that generates may load them before that, between two steps of its engine, as soon as
they are on the worker (``rollout.in_flight``). Each worker loads what it has when it looks, and the
workers of one engine when all of them have it, so it is time that decides; the rows record which
weights sampled each of their tokens (``token_versions``). At its place the node with the lag loads
what was not loaded before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pyarrow as pa

from siirl_dask.context import Metric, Reduce
from siirl_dask.planner import Chain, Edge, Iteration, Lagged, Link, Phase, Recv, RunNode, phase_of


class PastIterations:
    """Holds the iterations of phases with lagged links, back to the oldest whose rows a link may
    still need.

    ``chains`` are those of all workers, by plan: another worker holds the rows that one worker
    needs.
    """

    def __init__(self, chains: Mapping[str, Iterable[Chain]]) -> None:
        self._lags: dict[Phase, int] = {}
        for plan, workers in chains.items():
            phase = phase_of(plan).counts_as
            steps = max(_largest_lag(workers), self._lags.get(phase, 0))
            if steps:
                self._lags[phase] = steps
        self._iterations: list[Iteration] = []

    def begin(self, iteration: Iteration, completed: int) -> int:
        """Begin an iteration, and return the sequence number before which no rows are needed any
        more.

        All workers have completed the iterations before number ``completed``.
        """
        if iteration.phase.counts_as in self._lags:
            self._iterations.append(iteration)
        needed = completed
        for phase, steps in self._lags.items():
            sequences = (
                past.sequence for past in self._iterations if past.phase.counts_as == phase
            )
            done = [sequence for sequence in sequences if sequence < completed]
            needed = min([needed, *done[-steps:]])
        self._iterations = [past for past in self._iterations if past.sequence >= needed]
        return needed

    def lagged(self, iteration: Iteration, steps: int) -> Iteration | None:
        """Return the iteration ``steps`` steps earlier, or ``iteration`` itself when the pipeline
        drains.

        None while there have been fewer than that since the last drain.
        """
        if iteration.drain:
            return iteration
        since_drain = self._since_drain(iteration.phase.counts_as)
        return since_drain[-1 - steps] if len(since_drain) > steps else None

    def earlier(self, iteration: Iteration, steps: int) -> list[Iteration]:
        """Return the iterations since the last drain whose lagged links may run in ``iteration``,
        at their place or before it: at most ``steps``, oldest first.
        """
        return self._since_drain(iteration.phase.counts_as, before=iteration.sequence)[-steps:]

    def skipped(self, iteration: Iteration, steps: int) -> list[Iteration]:
        """Return the iterations whose lagged links never run because ``iteration`` drains and
        runs its own instead.
        """
        return self.earlier(iteration, steps) if iteration.drain else []

    def _since_drain(self, phase: Phase, before: int | None = None) -> list[Iteration]:
        """Return the iterations of a phase since its last drain, of all or of those before a
        sequence number.
        """
        since_drain: list[Iteration] = []
        for past in self._iterations:
            if past.phase.counts_as != phase or (before is not None and past.sequence >= before):
                continue
            if past.drain:
                since_drain.clear()
            else:
                since_drain.append(past)
        return since_drain


def _largest_lag(chains: Iterable[Chain]) -> int:
    steps = 0
    for chain in chains:
        for link in chain.links:
            if isinstance(link, Lagged):
                steps = max(steps, link.steps)
    return steps


Pulled = Future[pa.Table]
"""The rows of an edge, which arrive on the event loop."""


@dataclass(slots=True)
class BackgroundPulls:
    """Rows on their way to a worker for nodes with a lag, before their place in the chain, and the
    nodes that have run before it.
    """

    _pulled: dict[tuple[int, str], Pulled] = field(default_factory=dict)
    """Keys are the sequence number of an iteration and the name of an edge."""
    _ran: set[tuple[int, tuple[str, ...]]] = field(default_factory=set)
    """Elements are the sequence number of an iteration and names of nodes."""

    def begin(self, iteration: Iteration, edge: Edge, pull: Callable[[], Pulled]) -> None:
        """Begin to pull the rows of an edge, unless they are on their way."""
        key = (iteration.sequence, edge.name)
        if key not in self._pulled:
            self._pulled[key] = pull()

    def arrived(self, iteration: Iteration, edge: Edge) -> bool:
        """Return whether rows that are on their way are here, or cannot come."""
        return self._pulled[iteration.sequence, edge.name].done()

    def take(self, iteration: Iteration, edge: Edge) -> Pulled | None:
        """Return the pull of an edge and forget it; None where none has begun."""
        return self._pulled.pop((iteration.sequence, edge.name), None)

    def has_run(self, iteration: Iteration, link: Lagged) -> bool:
        """Return whether the links of ``link`` have run as in an iteration."""
        return (iteration.sequence, _nodes_of(link)) in self._ran

    def note_run(self, iteration: Iteration, link: Lagged) -> None:
        """Record that the links of ``link`` have run as in an iteration."""
        self._ran.add((iteration.sequence, _nodes_of(link)))

    def forget_run(self, iteration: Iteration, link: Lagged) -> None:
        """Forget what ``note_run`` has recorded: nobody asks again."""
        self._ran.discard((iteration.sequence, _nodes_of(link)))


def _nodes_of(link: Lagged) -> tuple[str, ...]:
    return tuple(inner.node.name for inner in link.links if isinstance(inner, RunNode))


@dataclass(slots=True)
class WeightsInFlight:
    """ArrivingWeights: those of earlier iterations, oldest first, which ``link`` loads otherwise.

    All their rows are on their way. So they are on every worker of the role, which may pass rows on
    to each other, also where one never asks for them.
    """

    link: Lagged
    waiting: list[Iteration]
    """Iterations whose weights are not loaded, oldest first."""
    pulls: BackgroundPulls
    run: Callable[[Iteration], None]
    """Runs the links of ``link`` as in an iteration."""
    metrics: dict[str, Metric]

    def arrived(self) -> bool:
        """Return whether all rows of the next weights are here, or cannot come."""
        if not self.waiting:
            return False
        return all(
            self.pulls.arrived(self.waiting[0], link.edge)
            for link in self.link.links
            if isinstance(link, Recv)
        )

    def load(self) -> None:
        """Load the weights that have arrived. PeerError where they cannot come."""
        start = time.perf_counter()
        iteration = self.waiting.pop(0)
        self.run(iteration)
        self.pulls.note_run(iteration, self.link)
        self._log("rollout/weights_in_flight", 1.0, Reduce.SUM)
        self._log("rollout/in_flight_seconds", time.perf_counter() - start, Reduce.MAX)

    def _log(self, name: str, value: float, reduce: Reduce) -> None:
        self.metrics.setdefault(name, Metric(reduce)).add(value)


def lagged_weights(links: Sequence[Link], role: str) -> Lagged | None:
    """Return the link of a chain that loads a role's weights some steps later; None if none does."""
    for link in links:
        if not isinstance(link, Lagged):
            continue
        nodes = [inner.node for inner in link.links if isinstance(inner, RunNode)]
        if any(node.weight_sink is not None and node.role == role for node in nodes):
            return link
    return None
