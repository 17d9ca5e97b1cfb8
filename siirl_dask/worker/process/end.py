"""The end of the process of a user's worker, once Dask has closed the worker."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from typing import Protocol
from weakref import WeakSet


class EndingWorker(Protocol):
    """The part of Dask's worker that is read here."""

    @property
    def nanny(self) -> object | None: ...

    async def finished(self) -> None: ...


_watched: WeakSet[EndingWorker] = WeakSet()
_tasks: set[asyncio.Task[None]] = set()
"""The loop itself keeps no reference to a task."""


def end_with(worker: EndingWorker) -> None:
    """End this process as soon as Dask has closed ``worker``, where a nanny started it for that
    worker alone. It must be called in the worker's event loop, any number of times.

    An interpreter that ends frees all that was imported. With torch and transformers that takes
    seconds, for which a cluster's ``close`` waits, and after four of them the nanny kills.
    """
    if worker.nanny is None or worker in _watched:
        return
    _watched.add(worker)
    task = asyncio.create_task(_end_after(worker))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _end_after(worker: EndingWorker) -> None:
    await worker.finished()
    if threading.current_thread() is not threading.main_thread():
        return  # the process is somebody else's as well
    # as an interpreter begins its end, and multiprocessing that of a child: this waits for threads
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
