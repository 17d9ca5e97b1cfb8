"""The Dask tasks of a run: each finds the run's plugin on its worker, waits for the tasks before it
and calls one method of the plugin.

Arguments are plain values, which no worker needs to unpickle. The scheduler imports this module to
hand the tasks out: it must not import torch, which would keep a scheduler from answering for
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil  # type: ignore[import-untyped]  # Dask needs it
from distributed import get_worker

from siirl_dask.dask_internals import plugin_of
from siirl_dask.errors import Aborted
from siirl_dask.planner import Iteration, Phase
from siirl_dask.worker.named_errors import portable

if TYPE_CHECKING:
    from distributed import Nanny, Worker

    from siirl_dask.worker.dag_worker import DAGWorker

_IterationFields = tuple[str, int, int, bool, int | None, str]
"""An iteration in plain values."""


def task_group(plugin: str, what: str) -> str:
    """Return the first part of the keys of a run's tasks of one kind, such as ``train``."""
    return f"siirl-{what}{plugin.removeprefix('siirl')}"


def is_task_of(plugin: str, key: object) -> bool:
    """Return whether a key is that of a task of the run with this plugin."""
    if not isinstance(key, tuple):
        return False
    return str(key[0]).endswith(plugin.removeprefix("siirl"))


def start_worker(plugin: str, number: int, ports: Sequence[int]) -> None:
    """Build this worker's roles. ``ports`` are those of all workers, in rank order."""
    _run_task(plugin, number, lambda running: running.start(ports))


def run_chain(plugin: str, number: int, iteration: _IterationFields, completed: int) -> None:
    """Run the chain once."""
    _run_task(plugin, number, lambda running: running.run_chain(_iteration(iteration), completed))


def save_worker(
    plugin: str,
    number: int,
    iteration: _IterationFields,
    completed: int,
    url: str,
) -> None:
    """Write this worker's part of a checkpoint."""
    _run_task(plugin, number, lambda running: running.save(_iteration(iteration), url, completed))


def finish_worker(plugin: str, number: int) -> None:
    """Free the roles as this task ends."""
    _run_task(plugin, number, lambda running: running.finish())


def port_of(plugin: str, dask_worker: Worker) -> int:
    """Return the port where the worker listens for its peers. Runs on the worker's event loop."""
    running: DAGWorker = plugin_of(dask_worker, plugin)
    return running.port


def describe_position(plugin: str, dask_worker: Worker) -> str:
    """Return a description of where the worker's task is. Runs on the worker's event loop."""
    running: DAGWorker | None = plugin_of(dask_worker, plugin)
    return "a task of a run that has left it" if running is None else running.position()


def describe_wait(plugin: str, dask_worker: Worker) -> dict[str, object]:
    """Return where the worker's task is, whom it waits for, and its stacks. Runs on the worker's
    event loop.
    """
    running: DAGWorker | None = plugin_of(dask_worker, plugin)
    if running is None:
        return {"place": "", "waits": False, "owed": [], "stacks": []}
    return running.describe_wait()


def beats_inside(plugin: str, dask_worker: Worker) -> int | None:
    """Return the number of beats of the run's task, None if none is running. Runs on the event
    loop.
    """
    running: DAGWorker | None = plugin_of(dask_worker, plugin)
    return None if running is None else running.beats_inside()


def describe_process(dask_worker: Nanny) -> tuple[str, int]:
    """Return the state of a worker's process by the system, such as ``stopped``, and its pid.
    Runs in its nanny.
    """
    assert dask_worker.pid is not None, "its process has ended"
    return psutil.Process(dask_worker.pid).status(), dask_worker.pid


def models_of(plugin: str, dask_worker: Worker) -> list[str]:
    """Return the roles with a state that the worker has built at their first use. Runs on the
    worker's event loop.
    """
    running: DAGWorker = plugin_of(dask_worker, plugin)
    return running.models_used()


def _run_task(plugin: str, number: int, work: Callable[[DAGWorker], None]) -> None:
    running: DAGWorker | None = plugin_of(get_worker(), plugin)
    if running is None:
        raise Aborted(
            f"the driver gave no sign of life: the run was taken off worker {get_worker().name!r}"
        )
    try:
        _run_in_order(running, number, work)
        return
    except Exception as error:
        failure = portable(error, running.worker_name)
    raise failure  # not above, where the first exception would become its context


def _run_in_order(running: DAGWorker, number: int, work: Callable[[DAGWorker], None]) -> None:
    """Call ``work`` after the worker's earlier tasks, which the driver numbers; nothing is freed
    meanwhile.
    """
    place = running.progress.at("a task of the run")
    with running.task_order.take(number), running.release.task(), running.tracing.task(), place:
        running.bind_device()
        work(running)


def _iteration(fields: _IterationFields) -> Iteration:
    phase, step, sequence, drain, position, frontier = fields
    return Iteration(
        phase=Phase(phase),
        step=step,
        sequence=sequence,
        drain=drain,
        position=position,
        frontier=frontier,
    )
