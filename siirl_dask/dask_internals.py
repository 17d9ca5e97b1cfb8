"""All that the package uses of Dask without Dask's promise that it stays: names with an underscore,
attributes that no page of its documentation has, and messages between its own processes.

``tests/test_dask_names.py`` holds every other module to what is documented, and this one to the
version that is installed. Each function says which name stands behind it. The scheduler imports
this module: no torch.
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from dask import system
from dask.utils import parse_timedelta as parse_timedelta
from distributed import Client, Nanny, SpecCluster, Status
from distributed.client import FutureCancelledError as FutureCancelledError
from distributed.comm.core import BaseListener as BaseListener
from distributed.comm.core import FatalCommClosedError as FatalCommClosedError
from distributed.comm.utils import ensure_concrete_host as ensure_concrete_host
from distributed.deploy.cluster import Cluster

if TYPE_CHECKING:
    from distributed import Scheduler, Security, Worker
    from distributed.comm.core import Comm

T = TypeVar("T")
# offset in struct tcp_info of tcpi_bytes_acked; tcpi_bytes_received follows (linux/tcp.h)
_BYTES_ACKED = 120
_RELEASES = "siirl-releases"  # in a worker's extensions


# Event loops


def start_on_loop(owner: Client | Cluster, work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start ``work`` on the event loop of a client or a cluster, from any thread, and return its
    future. Unlike ``sync`` of both it does not wait (``IOLoop.asyncio_loop``).
    """
    loop = owner.loop
    assert loop is not None  # only one that was never started has none
    return asyncio.run_coroutine_threadsafe(work, loop.asyncio_loop)  # type: ignore[attr-defined]


# Clients


class SchedulerRpc:
    """Calls handlers of the scheduler of a client or a cluster from its event loop, also after the
    connection is lost (``Client.scheduler``, ``Cluster.scheduler_comm``).
    """

    def __init__(self, owner: Client | Cluster) -> None:
        self._scheduler: Any = (
            owner.scheduler if isinstance(owner, Client) else owner.scheduler_comm
        )
        assert self._scheduler is not None  # only one that is closed has none

    @property
    def address(self) -> str:
        """The scheduler's address."""
        return str(self._scheduler.address)

    async def call(self, handler: str, **arguments: Any) -> Any:
        """Return the answer of a handler of the scheduler; None where it has none of that name.
        OSError where the scheduler is gone.
        """
        return await getattr(self._scheduler, handler)(**arguments)

    async def identity(self, n_workers: int) -> dict[str, Any]:
        """Return what ``Client.scheduler_info`` does, which cannot be awaited: who the scheduler
        is, with ``n_workers`` of its workers, or all for -1.
        """
        identity: dict[str, Any] = await self._scheduler.identity(n_workers=n_workers)
        return identity

    async def end_workers(self, addresses: Sequence[str], timeout: float) -> None:
        """End workers; nannies start others in their place. ``Client.restart_workers`` refuses
        workers without a nanny, and waits until the others are back.
        """
        await self._scheduler.restart_workers(
            workers=addresses,
            timeout=timeout,
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"siirl-dask-give-up-{time.time()}",
        )


def is_connected(client: Client) -> bool:
    """Return whether a client has a scheduler now."""
    if client.scheduler is None:
        return False
    return client.status == "running"


async def hang_up(client: Client) -> None:
    """End all calls and futures of a client that wait for its scheduler. ``Client.close`` would
    wait for that itself (``Client.futures``, ``scheduler_comm``, ``rpc``).
    """
    for state in client.futures.values():
        state.cancel(reason="scheduler-connection-lost", msg="The run has given the scheduler up.")
    if client.scheduler_comm is not None:
        client.scheduler_comm.abort()
    await client.rpc.close()


# Clusters


def can_scale(cluster: Cluster) -> bool:
    """Return whether a cluster starts workers when it is asked to: ``scale`` of one that does not
    does nothing, or raises, by class (``Cluster._supports_scaling``).
    """
    return bool(cluster._supports_scaling)


def largest_size(cluster: Cluster | None) -> int | None:
    """Return the most workers that a cluster object will have unless somebody scales it; None where
    that cannot be told: of an adaptive one without a maximum, and of classes that say of no worker
    beforehand that it comes (``Cluster._adaptive``, ``plan``, ``observed``).
    """
    if not isinstance(cluster, SpecCluster):
        return None
    there = len({str(name) for name in (*cluster.plan, *cluster.observed)})
    adaptive = cluster._adaptive
    if adaptive is None or adaptive.periodic_callback is None:
        return there
    if math.isinf(adaptive.maximum):
        return None
    return max(there, int(adaptive.maximum))


async def scale(cluster: SpecCluster, workers: int) -> None:
    """Have a cluster of ``workers`` workers, and raise what one of them raises that cannot be
    started. ``scale`` alone would log that (``SpecCluster._correct_state``).
    """
    corrected = cluster._correct_state()  # before scale(), which calls it as well
    cluster.scale(workers)
    try:
        await corrected
    except Exception:
        # the errors of other workers: one is shown
        asyncio.get_running_loop().set_exception_handler(_ignore)
        for worker in cluster.workers.values():
            # Dask's close() insists on a status, and gives none to these
            worker.status = Status.failed
        raise


def _ignore(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    pass


def jobs_without_workers(cluster: SpecCluster, lost: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the process of each job of which workers are ``lost``, by name, and none
    is left, and take it out of the cluster (``worker_spec``, ``workers``).
    """
    present = {str(info["name"]) for info in cluster.scheduler_info["workers"].values()}
    for job, spec in list(cluster.worker_spec.items()):
        names = {f"{job}{suffix}" for suffix in spec.get("group", ("",))}
        if job in cluster.workers and not names.isdisjoint(lost) and names.isdisjoint(present):
            yield str(job), cluster.workers.pop(job)


def processes_of(cluster: Cluster) -> list[Any]:
    """Return the jobs or processes of a cluster; none where its class has no list of them."""
    return list(getattr(cluster, "workers", {}).values())


def queues_of(nanny: Nanny) -> list[Any]:
    """Return the queues over which a nanny talks to its worker's process
    (``WorkerProcess.init_result_q``, ``child_stop_q``).
    """
    process = nanny.process
    if process is None:
        return []
    return [process.init_result_q, process.child_stop_q]


# Inside the scheduler


def plugins_of(scheduler: Scheduler) -> Mapping[str, Any]:
    """Return the plugins of a scheduler, by name (``Scheduler.plugins``)."""
    plugins: Mapping[str, Any] = scheduler.plugins
    return plugins


def tasks_by_state(scheduler: Scheduler) -> dict[str, dict[str, int]]:
    """Return how many tasks each group of a scheduler has in each state
    (``Scheduler.task_groups``).
    """
    counts: dict[str, dict[str, int]] = {}
    for name, group in scheduler.task_groups.items():
        counts[str(name)] = {str(state): count for state, count in group.states.items()}
    return counts


def add_handlers(scheduler: Scheduler, handlers: Mapping[str, Callable[..., Any]]) -> None:
    """Have a scheduler answer calls of these names, for ``SchedulerRpc.call``
    (``Scheduler.handlers``): ``Client.run_on_scheduler`` sends pickles.
    """
    scheduler.handlers.update(handlers)


def remove_handlers(scheduler: Scheduler, names: Iterable[str]) -> None:
    """Undo ``add_handlers``."""
    for name in names:
        scheduler.handlers.pop(name, None)


def send_to_workers(
    scheduler: Scheduler, addresses: Iterable[str], message: Mapping[str, Any]
) -> None:
    """Send a message to the handler of its ``op`` on each worker that is connected, without
    waiting (``Scheduler.stream_comms``, ``send_all``): a broadcast waits for an answer of each.
    """
    present = [address for address in addresses if address in scheduler.stream_comms]
    scheduler.send_all({}, {address: [dict(message)] for address in present})


async def remove_worker_plugin(scheduler: Scheduler, name: str) -> None:
    """Remove a plugin of workers, as ``Client.unregister_worker_plugin`` does, where no client is
    left. OSError where a worker is gone, ValueError where no worker has it.
    """
    await scheduler.unregister_worker_plugin(comm=None, name=name)


def connections_of(scheduler: Scheduler) -> Iterator[Comm]:
    """Yield the open connections of a scheduler, those that others have opened first
    (``Server._comms``, ``ConnectionPool.available``, ``occupied``).
    """
    yield from scheduler._comms
    for comms in (*scheduler.rpc.available.values(), *scheduler.rpc.occupied.values()):
        yield from comms


def connection_bytes(comm: Comm) -> int | None:
    """Return the bytes over a connection so far, both ways; None where they cannot be counted
    (``TCP.stream``).
    """
    stream = getattr(comm, "stream", None)
    if stream is None or stream.closed():
        return None
    info = stream.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 16)
    if len(info) < _BYTES_ACKED + 16:
        return None
    acked, received = struct.unpack_from("QQ", info, _BYTES_ACKED)
    return int(acked + received)


# The scheduler's dashboard


def heartbeat_seconds(workers: int) -> float:
    """Return the seconds between two heartbeats of a worker of a cluster of so many
    (``scheduler.heartbeat_interval``).
    """
    from distributed.scheduler import heartbeat_interval  # no worker and no client needs it

    return float(heartbeat_interval(workers))


def dashboards_of(scheduler: Scheduler, kind: type[T]) -> list[T]:
    """Return the applications of a ``kind`` that serve the pages of a scheduler
    (``http_application``): none without a dashboard.
    """
    applications = scheduler.http_application.applications
    return [application for application in applications if isinstance(application, kind)]


def add_dashboard_page(
    scheduler: Scheduler,
    path: str,
    prefix: str,
    document: Callable[..., None],
) -> Any:
    """Return an application of Bokeh's that shows ``document`` at ``/path`` of a scheduler's
    dashboard, linked from its other pages, and not started yet. ImportError without Bokeh.

    Dask has no public way to add a page to a dashboard that is up (``BokehApplication``,
    ``template_variables``).
    """
    from distributed.dashboard.core import BokehApplication
    from distributed.dashboard.scheduler import template_variables

    variables = template_variables(scheduler)
    if path not in variables["pages"]:
        variables["pages"].insert(0, path)
    application = BokehApplication(
        {f"/{path}": document}, scheduler, prefix=prefix, template_variables=variables
    )
    scheduler.http_application.add_application(application)
    return application


def page_template(text: str) -> Any:
    """Return a template that may extend those of Dask's own pages (``components.scheduler.env``).
    A second of imports, which few schedulers need.
    """
    from distributed.dashboard.components.scheduler import env

    return env.from_string(text)


# Inside a worker


def cpu_count() -> int:
    """Return the CPUs of this process by Dask's count, which knows a container's quota
    (``dask.system.CPU_COUNT``).
    """
    return int(system.CPU_COUNT)


def plugin_of(worker: Worker, name: str | None) -> Any:
    """Return a plugin of a worker; None where it has none of that name (``Worker.plugins``)."""
    return worker.plugins.get("" if name is None else name)


def releases_of(worker: Worker) -> list[Any]:
    """Return the list of what runs hold in a worker's process, which lives as long as that
    (``Worker.extensions``).
    """
    releases: list[Any] = worker.extensions.setdefault(_RELEASES, [])
    return releases


def handle_messages(worker: Worker, op: str, handler: Callable[..., None]) -> None:
    """Have a worker pass messages of ``send_to_workers`` on to ``handler``
    (``Worker.stream_handlers``). Dask closes a worker that gets a message without a handler.
    """
    worker.stream_handlers[op] = handler


def heartbeat_metrics(worker: Worker) -> dict[str, Callable[[Worker], Any]]:
    """Return what a worker sends with each heartbeat, to be changed in place: ``Worker(metrics=)``
    is documented, and is for those who start it (``Worker.metrics``).
    """
    metrics: dict[str, Callable[[Worker], Any]] = worker.metrics
    return metrics


def clock_offset(worker: Worker) -> float:
    """Return the seconds by which the scheduler's clock is ahead of this host's, as Dask has found
    at the last heartbeat (``Worker.scheduler_delay``).
    """
    return float(worker.scheduler_delay)


def security_of(worker: Worker) -> Security:
    """Return the certificates of a worker (``Worker.security``)."""
    security: Security = worker.security
    return security


def certificates_of(worker: Worker) -> tuple[dict[str, Any], dict[str, Any], bool]:
    """Return the arguments with which a worker listens and connects, and whether it must encrypt
    (``Worker.security``, ``connection_args``).
    """
    security = security_of(worker)
    return (
        security.get_listen_args("worker"),
        worker.connection_args,
        bool(security.require_encryption),
    )
