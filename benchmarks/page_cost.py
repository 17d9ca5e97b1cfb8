"""Processor time of the run's page on the scheduler: without a viewer, and with one, at N workers.

    python benchmarks/page_cost.py --workers 256 --seconds 60

The page's own code runs on a scheduler without workers, which is told what N workers tell: a record
a step, an event and a pulse a worker. A viewer's document looks every half second, and reads the
trace of a run folder that is written beside, with as many rows as a worker of the quickstart has
(57 a step). What changes becomes the messages that a browser gets, which go nowhere: the cost of
the socket is not in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from bokeh.document import Document
from bokeh.document.events import DocumentPatchedEvent
from bokeh.protocol import Protocol
from distributed.dashboard.components.scheduler import env
from siirl_storage import stage_part

from siirl_dask.observe.trace.trace_table import trace_table
from siirl_dask.trace import Entry, Lane
from siirl_dask.views.dashboard.page import show_page
from siirl_dask.views.dashboard.scheduler_source import SchedulerSource
from siirl_dask.views.dashboard.store import RunStore
from siirl_dask.views.dashboard.style import TEMPLATE

_EVERY = 0.5  # seconds between two looks of a viewer
_SECOND = 10**9
_METRICS = 60
_NODES = ("prompts", "rollout", "reward", "old_logprobs", "advantage", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a step")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--looks", type=int, default=40, help="timed, between two steps")
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        scheduler, store = _scheduler(given.workers), RunStore()
        _begin(store, folder, given.workers)
        alone = min(_step(store, folder, given.workers, at) for at in range(1, given.steps + 1))
        viewer = Document()
        source = SchedulerSource(scheduler, store)
        show_page(source, env.from_string(TEMPLATE), {}, viewer)
        viewer.on_change(_message)
        (callback,) = viewer.session_callbacks
        look = callback.callback
        for _ in range(100):  # until the folder has been read
            look()
            time.sleep(0.02)
        # as often as a viewer does: some show no pulses
        idle = _looks(scheduler, look, given.looks)
        news = []
        for at in range(given.steps + 1, 2 * given.steps + 1):
            _step(store, folder, given.workers, at)
            before = time.process_time()
            _looks(scheduler, look, 4)
            time.sleep(1.0)  # for the threads that read the folder
            _looks(scheduler, look, 2)
            news.append(time.process_time() - before - 6 * idle)
    viewed = alone + idle * given.seconds / _EVERY + max(0.0, min(news))
    print(f"{given.workers} workers, a step of {given.seconds:g} s")
    for name, cost in (("without a viewer", alone), ("with a viewer", viewed)):
        print(f"  {name}: {cost * 1000:.0f} ms a step, {cost / given.seconds:.2%} of a core")
    print(
        f"  a look without news {idle * 1000:.1f} ms, what a new step adds {min(news) * 1000:.0f} "
        "ms"
    )


def _scheduler(workers: int) -> Any:
    """Return what the page reads of a scheduler."""
    states = {
        f"tcp://w:{at}": SimpleNamespace(
            host=f"host{at // 8}",
            last_seen=time.time(),
            metrics={"memory": 10**9, "siirl-a": [0, "node 'update', train step 3", False]},
        )
        for at in range(workers)
    }
    return SimpleNamespace(workers=states, plugins={"siirl-a": None})


def _begin(store: RunStore, folder: str, workers: int) -> None:
    members = {str(at): f"tcp://w:{at}" for at in range(workers)}
    about = {
        "url": folder,
        "name": "a",
        "plugin": "siirl-a",
        "members": members,
        "done": 0,
        "steps": 1000,
    }
    store.begin(about)


def _step(store: RunStore, folder: str, workers: int, at: int) -> float:
    """Write the trace of a step and tell the store of it; return the processor time of the
    latter.
    """
    for worker in range(workers):
        spans = list(_spans(at, worker, workers))
        stage_part(
            f"{folder}/trace/step={at:06d}", 1, worker, trace_table(spans, str(worker), "boot", 0)
        )
    metrics = {f"metric/{one}": 0.5 for one in range(_METRICS)} | {"reward/mean": 0.5}
    before = time.process_time()
    for worker in range(workers):
        told = {
            "kind": "done",
            "member": str(worker),
            "metrics": {"tokens": ["sum", 1, 7.0, 0, 0, 0]},
        }
        store.event("siirl-a", told)
    store.record(folder, {"step": at, "phase": "train", "seconds": 60.0, "metrics": metrics})
    return time.process_time() - before


def _spans(step: int, worker: int, workers: int) -> Iterator[Entry]:
    """Yield what a worker records of a step: a task of six nodes that take nine seconds and wait
    for a part of it.
    """
    began = step * 60 * _SECOND

    def entry(
        lane: Lane, what: str, name: str, at: float, seconds: float, amount: int | None = None
    ) -> Entry:
        beside = what in ("count", "write", "save")
        times = began + round(at * _SECOND), round(seconds * _SECOND)
        return Entry(lane, what, name, beside, "train", step, *times, amount)

    for place, node in enumerate(_NODES):
        at, edge = 9.0 * place, f"{node}->next"
        yield entry(Lane.WAIT, "rows", edge, at + 0.1, 1.0 + worker / workers)
        yield entry(Lane.TRANSFER, "rows", edge, at + 2.2, 0.2, 10**6)
        yield entry(Lane.COMPUTE, "node", node, at, 9.0, 10**9)
        yield entry(Lane.TRANSFER, "publish", edge, at + 8.5, 0.2, 10**6)
        yield entry(Lane.STORAGE, "write", f"stages/{node}", at + 8.7, 1.0, 10**6)
    for tensor in range(8):
        yield entry(Lane.COMPUTE, "stage", "weights", 54.2 + tensor / 2, 0.4)
    for point in range(14):
        yield entry(Lane.COMPUTE, "count", "progress", 4.0 * point, 0.0, point)
    for source in range(4):
        yield entry(
            Lane.TRANSFER,
            "count",
            f"from {(worker + source) % workers} by messages",
            59.0,
            0.0,
            10**6,
        )
    yield entry(Lane.CONTROL, "task", "train", 0.0, 59.0)


def _message(event: object) -> None:
    """Make the message of a change, as a server does for each browser."""
    if isinstance(event, DocumentPatchedEvent):
        message = Protocol().create("PATCH-DOC", [event])
        _ = message.header_json, message.content_json, message.metadata_json


def _looks(scheduler: Any, look: Any, count: int) -> float:
    """Return the processor time of one look, of ``count``, before each of which all workers have
    told of a beat.
    """
    cost = 0.0
    for _ in range(count):
        for state in scheduler.workers.values():
            beats, place, waits = state.metrics["siirl-a"]
            state.metrics["siirl-a"], state.last_seen = [beats + 7, place, waits], time.time()
        before = time.process_time()
        look()
        cost += time.process_time() - before
        time.sleep(_EVERY)
    return cost / count


if __name__ == "__main__":
    main()
