"""Runs a chain. It matches over links and knows no role, no algorithm, no engine and no Dask."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import format_exc
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from siirl_storage import join, write_part

from siirl_dask.context import Context, Device, Metric, Parts, Rank, Reduce
from siirl_dask.coordinator.databuffer import Databuffer
from siirl_dask.coordinator.dataloader import Dataloader
from siirl_dask.coordinator.messages import Turn
from siirl_dask.errors import NodeError, SiirlError
from siirl_dask.planner import Behind, Chain, Drop, Input, Keep, Link, Load, Node, Recv, Run, Send, Stream
from siirl_dask.schema import IDENTITY, ROW_ID, TYPES
from siirl_dask.worker.broadcast import Broadcast
from siirl_dask.worker.history import History
from siirl_dask.worker.stop import StopFlag, wait_for
from siirl_dask.worker.streaming import Clock, Wire, giving, in_order, taking

_T = TypeVar("_T")
Meter = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What a worker has at hand while it runs its chains."""

    device: Device
    run_url: str
    run_seed: int
    resources: Mapping[str, Any]
    """What each role of this worker built."""
    ranks: Mapping[str, Rank]
    all_sum: Callable[[str, Sequence[float]], list[float]]
    """Sums numbers over the workers of a role."""
    share: Callable[[Turn, Node, Sequence[Any], Any], Any] | None
    """Work of a node that peers may take over; None where that is not wanted."""
    databuffer: Databuffer
    loop: asyncio.AbstractEventLoop
    """The loop that the databuffer lives on."""
    stop: StopFlag
    meter: Meter
    """Shows a node's time by its name wherever the process is watched."""
    part: int
    """Bytes at most of what moves at once of a table that moves in parts."""
    broadcasts: Mapping[tuple[str, ...], Broadcast] = field(default_factory=dict)
    """Those that the run has, by who takes part; a table that one can bring goes by it."""
    kept: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What nodes keep from one turn to the next, by phase and name."""


@dataclass(slots=True)
class Execution:
    """One passage through a chain."""

    bench: Bench
    turn: Turn
    loader: Dataloader
    history: History
    tables: dict[str, pa.Table] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    _loaded: Load | None = None

    def run(self, chain: Chain) -> dict[str, Metric]:
        """Go through the chain's links and give back what was logged. Aborted when told to stop between two of them."""
        databuffer = self.bench.databuffer
        received = databuffer.traffic.total
        self._follow(chain.links)
        self._context("").log("bytes/peers", databuffer.traffic.total - received, Reduce.SUM)
        return self.metrics

    def _follow(self, links: Sequence[Link]) -> None:
        databuffer = self.bench.databuffer
        for link in links:
            self.bench.stop.check()
            match link:
                case Load(name, columns, index, count):
                    self._loaded = link
                    with _Timed(self, name):
                        self.tables[name] = self.loader.load(self.turn.batch, columns, index, count)
                case Run():
                    with _Timed(self, link.node.name):
                        self.tables[link.node.name] = self._run_node(link)
                case Stream():
                    self._stream(link)
                case Send(edge):
                    self._wait(databuffer.publish(edge, self.turn, self.tables[edge.source]))
                case Recv(edge, guide):
                    with _Timed(self, edge.name):
                        self.tables[edge.name] = self._wait(databuffer.pull(edge, guide, self.turn))
                case Keep(node, table, index, count):
                    folder = join(self.bench.run_url, table, f"step={self.turn.step:06d}")
                    write_part(folder, index, count, self.tables[node])
                case Drop(table):
                    del self.tables[table]
                case Behind(steps, inner):
                    if (earlier := self.history.earlier(self.turn, steps)) is not None:
                        replace(self, turn=earlier, tables={})._follow(inner)

    def _wait(self, work: Coroutine[Any, Any, _T]) -> _T:
        return wait_for(work, self.bench.loop, self.bench.stop)

    def _context(self, role: str) -> Context:
        bench = self.bench
        return Context(
            step=self.turn.step,
            settles=self.turn.settles,
            run_seed=bench.run_seed,
            rank=bench.ranks.get(role, Rank()),
            device=bench.device,
            resource=bench.resources.get(role),
            resources=bench.resources,
            metrics=self.metrics,
            sum_over_workers=partial(bench.all_sum, role),
        )

    def _context_of(self, node: Node) -> Context:
        context, load = self._context(node.role), self._loaded
        context.kept = self.bench.kept.setdefault(f"{self.turn.phase}/{node.name}", {})
        if self.bench.share is not None and context.rank.size > 1:
            context.share = partial(self.bench.share, self.turn, node)
        if node.contract.draws and load is not None:
            context.more = partial(self.loader.more, columns=load.columns, index=load.index, count=load.count)
        return context

    def _run_node(self, link: Run) -> pa.Table:
        with self._named(link.node):
            table = self._joined(link.inputs)
            given = link.node.fn(self._context_of(link.node), table)
            return _checked(link.node, link.columns, table, given)

    def _stream(self, link: Stream) -> None:
        """Make the source's table and have the target take it, each as far as it is this worker's."""
        bench, clock = self.bench, Clock(self.bench.meter)
        broadcast = bench.broadcasts.get(link.joins)
        made = self._made(link, tensors=broadcast is not None) if link.gives else iter(())
        made = clock.timed(link.source.name, made)
        if link.edge is None:
            about = next(made)
            self._take(link, Parts(about, in_order(about, made, link.source.name)), clock)
        else:
            wire = Wire(link.edge, self.turn, bench.databuffer, bench.loop, bench.stop)
            if broadcast is not None:
                self._broadcast(link, made, wire, broadcast, clock)
            else:
                self._relay(link, made, wire, clock)
        clock.log(self.metrics)

    def _relay(self, link: Stream, made: Iterator[pa.Table], wire: Wire, clock: Clock) -> None:
        given = giving(made, wire, clock)
        if link.takes:
            self._take(link, taking(wire, given, clock), clock)
        for _ in given:
            self.bench.stop.check()

    def _broadcast(self, link: Stream, made: Iterator[Any], wire: Wire, broadcast: Broadcast, clock: Clock) -> None:
        """Only what is announced goes along the wire."""
        waiting = partial(clock.running, wire.edge.name)
        if link.gives:
            about = next(made)
            wire.publish(0, about)
            sent = broadcast.send(about, made, waiting)
            self._context("").log("bytes/broadcast", sent, Reduce.SUM)
        else:
            with waiting():
                about = wire.wait_for(wire.ask_for(0))
            self._take(link, Parts(about, broadcast.receive(about, waiting)), clock, tensors=True)

    def _made(self, link: Stream, *, tensors: bool) -> Iterator[Any]:
        """What the source announces, which one of its workers tells, and this worker's share of each part; or every
        tensor.
        """
        node = link.source
        make = _there(node.gives_tensors if tensors else node.gives_parts)
        options = {} if tensors else {"most": self.bench.part}
        with self._named(node):
            table = self._joined(link.inputs)
            parts = make(self._context_of(node), table, **options)
            if not isinstance(parts, Parts):
                raise NodeError(f"node {node.name!r} gave a {type(parts).__name__}: expected Parts")
            about = _checked(node, link.columns, table, parts.about)
            tells = link.edge is None or link.edge.sources[0] == self.bench.device.worker
            yield about if tells else about.slice(0, 0)
            for part in parts.tables:
                yield part if tensors else _checked(node, link.columns, table, part)
                del part  # or it would be there while the next is made

    def _take(self, link: Stream, parts: Parts, clock: Clock, *, tensors: bool = False) -> None:
        """Have the target take the parts. What it leaves is let go of, since others wait for it to be taken."""
        node = link.target
        take = _there(node.takes_tensors if tensors else node.takes_parts)
        with self._named(node), clock.running(node.name), closing(parts.tables):
            take(self._context_of(node), parts)
            for _ in parts.tables:
                self.bench.stop.check()

    def _joined(self, inputs: Sequence[Input]) -> pa.Table:
        return _join([self.tables[item.table].select(item.columns) for item in inputs])

    @contextmanager
    def _named(self, node: Node) -> Iterator[None]:
        """Whatever goes wrong inside is said to be of the node."""
        try:
            yield
        except SiirlError as error:
            error.add_note(f"in node {node.name!r}, {self.turn}, worker {self.bench.device.worker!r}")
            raise
        except Exception as error:
            where = f"node {node.name!r}, {self.turn}, worker {self.bench.device.worker!r}"
            failure = NodeError(f"{where}: {type(error).__name__}: {error}")
            failure.add_note(format_exc())  # a traceback does not cross processes
            raise failure from error


class _Timed:
    """Logs the seconds a link takes and shows it by name on the dashboard."""

    def __init__(self, execution: Execution, name: str) -> None:
        self._execution = execution
        self._name = name
        self._meter = execution.bench.meter(name)

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._meter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)
        metric = self._execution.metrics.setdefault(f"seconds/{self._name}", Metric(Reduce.MAX))
        metric.add(time.perf_counter() - self._started)


def _there(function: Callable[..., Any] | None) -> Callable[..., Any]:
    """The planner made a link of it, so there is one."""
    assert function is not None
    return function


def _join(tables: list[pa.Table]) -> pa.Table:
    """The columns of all tables, row by row, sorted by row id. NodeError when they do not hold the same rows."""
    tables = [_sorted(table) for table in tables]
    first = tables[0]
    columns = {name: first[name] for name in first.column_names}
    for other in tables[1:]:
        if not other[ROW_ID].equals(first[ROW_ID]):
            raise NodeError(
                f"its parents hold different rows: {first.num_rows} and {other.num_rows}, not the same row ids; "
                "a node that removes rows must come before the branches part"
            )
        columns |= {name: other[name] for name in other.column_names if name not in IDENTITY}
    return pa.table(columns)


def _sorted(table: pa.Table) -> pa.Table:
    ids = table[ROW_ID].combine_chunks().to_numpy()
    return table if (ids[1:] >= ids[:-1]).all() else table.take(pc.sort_indices(table[ROW_ID]))


def _checked(node: Node, columns: Sequence[str], table: pa.Table, given: object) -> pa.Table:
    """``columns`` of the node's output, held against its contract. NodeError names the column."""
    if not isinstance(given, pa.Table):
        raise NodeError(f"node {node.name!r} gave a {type(given).__name__}: expected a pyarrow Table")
    contract = node.contract
    declared = {name: TYPES[name] for name in IDENTITY} | {field.name: field.type for field in contract.writes}
    known = set(declared) | (set(table.column_names) if contract.passes else set())
    if undeclared := [name for name in given.column_names if name not in known]:
        raise NodeError(f"node {node.name!r} gave columns it does not declare: {undeclared}; add them to its writes")
    if missing := [name for name in columns if name not in given.column_names]:
        raise NodeError(f"node {node.name!r} did not give {missing} (it gave {given.column_names})")
    for name, kind in declared.items():
        if name in given.column_names and given[name].type != kind:
            raise NodeError(f"node {node.name!r} gave {name!r} as {given[name].type}: its contract says {kind}")
    same = contract.new_rows or given[ROW_ID].equals(table[ROW_ID])
    if not same and sorted(given[ROW_ID].to_pylist()) != table[ROW_ID].to_pylist():
        raise NodeError(f"node {node.name!r} changed which rows there are: declare new_rows=True in its @columns")
    return given.select(columns)
