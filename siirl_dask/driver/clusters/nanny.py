"""Starts worker processes as Dask does, without the user's script in them.

No semaphores stay in ``/dev/shm`` when all processes are killed at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from multiprocessing.synchronize import SemLock
from multiprocessing.util import Finalize
from typing import Any

from distributed import Nanny, Status

from siirl_dask.dask_internals import queues_of

# as distributed.nanny names the processes that it starts
_WORKER = "Dask Worker process (from Nanny)"


class NamelessNanny(Nanny):
    """A nanny whose worker's semaphores have no names once the worker runs.

    A nanny and its worker talk over two queues with three semaphores each. The worker finds them by
    their names, which are files that a process unlinks as it ends: after ``kill -9`` of them all
    they would stay until the next boot.
    """

    async def instantiate(self) -> Status:
        status = await super().instantiate()
        for queue in queues_of(self):
            unlink_names(queue)
        return status


def unlink_names(queue: Any) -> None:
    """Unlink the names of a multiprocessing queue's semaphores, which go on for those that have
    opened them.
    """
    for finalize in _finalizers(queue):
        finalize()  # it unlinks the name, informs the resource tracker, and does so only once


def _finalizers(queue: Any) -> Iterator[Finalize]:
    """Yield the finalizers of the semaphores in a queue's attributes."""
    if queue is None:
        return
    for attribute in vars(queue).values():
        if not isinstance(attribute, SemLock):
            continue
        for reference in weakref.getweakrefs(attribute):
            callback = reference.__callback__
            if isinstance(callback, Finalize):
                yield callback


@contextmanager
def main_not_imported() -> Iterator[None]:
    """Start Dask's worker processes inside without importing this process's main module in them.

    multiprocessing imports it in each process that it starts, so a script without ``if __name__ ==
    "__main__":`` would call ``run`` once more in each worker. Workers need nothing of it: what a
    DAG uses of it is sent by value. Other processes are started as before.
    """
    before = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        data = before(name)
        if name == _WORKER:
            data.pop("init_main_from_name", None)
            data.pop("init_main_from_path", None)
        return data

    spawn.get_preparation_data = without_main
    try:
        yield
    finally:
        spawn.get_preparation_data = before
