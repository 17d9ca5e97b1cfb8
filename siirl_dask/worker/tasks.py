"""The Dask tasks of a run: each finds the run's plugin on its worker and calls one method of it.

Arguments are plain values, which no worker needs to unpickle. The scheduler imports this module to hand the tasks out:
it must not import torch, which would keep a scheduler from answering for seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from distributed import get_worker

from siirl_dask.planner import Iteration, Phase
from siirl_dask.worker.named_errors import deliver_errors

if TYPE_CHECKING:
    from distributed import Worker

    from siirl_dask.worker.dag_worker import DAGWorker


def start_worker(plugin: str) -> None:
    """Build this worker's roles."""
    _call(plugin, lambda running: running.start())


def run_chain(plugin: str, iteration: tuple[str, int, int, bool], completed: int, after: None) -> None:
    """Run the chain once. ``after`` is the result of this worker's previous task."""
    _call(plugin, lambda running: running.run_chain(_iteration(*iteration), completed))


def save_worker(plugin: str, iteration: tuple[str, int, int, bool], url: str, completed: int, after: None) -> None:
    """Write this worker's part of a checkpoint."""
    _call(plugin, lambda running: running.save(_iteration(*iteration), url, completed))


def finish_worker(plugin: str, after: None) -> None:
    """Free the roles."""
    running = _plugin(plugin)
    deliver_errors(running.worker_name, running.release.end, 0.0)


def describe_position(plugin: str, dask_worker: Worker) -> str:
    """Return a description of where the worker's task is. Runs on the worker's event loop."""
    running: DAGWorker | None = dask_worker.plugins.get(plugin)  # type: ignore[assignment]  # its name is the run's
    return "a task of a run that has left it" if running is None else running.position()


def _call(plugin: str, work: Callable[[DAGWorker], None]) -> None:
    """Call a method of the run's plugin, which frees nothing meanwhile; an error goes to the driver."""
    running = _plugin(plugin)
    with running.release.task():
        deliver_errors(running.worker_name, work, running)


def _plugin(name: str) -> DAGWorker:
    plugin: DAGWorker = get_worker().plugins[name]  # type: ignore[assignment]  # its name is the run's
    return plugin


def _iteration(phase: str, step: int, sequence: int, drain: bool) -> Iteration:
    return Iteration(Phase(phase), step, sequence, drain)
