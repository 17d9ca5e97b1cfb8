"""Tasks for the workers, and calls to the scheduler that have no timeout of their own, from the
driver's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import wait
from typing import Any, TypeVar

from dask.base import annotate
from distributed import Client, Future

from siirl_dask.dask_internals import start_on_loop
from siirl_dask.worker.tasks import task_group

T = TypeVar("T")
SLICE = 0.2  # seconds within which Ctrl-C is noticed


def complete(
    client: Client,
    call: Callable[[], Awaitable[T]],
    meanwhile: Callable[[], None] = lambda: None,
    timeout: float = math.inf,
) -> T:
    """Return the result of an asynchronous ``call`` on the client's event loop.

    ``meanwhile`` is called every ``SLICE`` seconds until then: an exception that it raises ends the
    wait. TimeoutError after ``timeout`` seconds.
    """

    async def work() -> T:
        return await call()

    calling = start_on_loop(client, work())
    deadline = time.monotonic() + timeout
    try:
        while not wait([calling], SLICE).done:
            meanwhile()
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer of the scheduler within {timeout:g} s")
    except BaseException:
        calling.cancel()
        raise
    return calling.result()


def submit(
    client: Client,
    plugin: str,
    what: str,
    run: str,
    members: Mapping[str, str],
    function: Callable[..., None],
    *,
    turn: int,
    resources: Mapping[str, float] | None = None,
    **arguments: Any,
) -> dict[str, Future[Any]]:
    """Submit one task to each worker, pinned to it; all of them as one graph, of which none waits
    for another.

    A worker runs its tasks in the order of ``turn``, without a message from the scheduler between
    two steps. Each claims ``resources`` of its worker while it runs. Dask's pages show the tasks as
    ``siirl-train``, by ``what`` they do, and in a span of that within one of the ``run``. There is
    no span for each step: Dask forgets none.
    """
    group = task_group(plugin, what)
    keys = {(group, turn, worker): address for worker, address in members.items()}
    span = {"name": (run, what), "ids": (plugin, group)}
    # the scheduler asks the former for each key
    annotations: dict[str, Any] = {"workers": keys.__getitem__, "span": span}
    if resources:
        annotations["resources"] = dict(resources)
    with annotate(**annotations):
        futures = client.map(
            function,
            [plugin] * len(members),
            key=list(keys),
            pure=False,
            fifo_timeout="0ms",
            number=turn,
            **arguments,
        )
    return dict(zip(members, futures, strict=True))
