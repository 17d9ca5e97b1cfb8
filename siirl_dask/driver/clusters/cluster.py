"""The Dask cluster of a run: started on this machine, an existing one, or what a cluster spec
describes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

import dask
from distributed import Client, LocalCluster, Nanny, Security, Status

from siirl_dask.config import ClusterConfig, Config, DevicePreference
from siirl_dask.dask_internals import processes_of
from siirl_dask.devices import NO_ACCELERATORS
from siirl_dask.driver.clusters.adaptive import HINT, want_workers
from siirl_dask.driver.clusters.deployment import deployed
from siirl_dask.driver.clusters.nanny import NamelessNanny, main_not_imported
from siirl_dask.driver.clusters.scheduler_file import address_in, read_address
from siirl_dask.driver.clusters.wait_for_workers import wait_for_workers
from siirl_dask.driver.recovery.scheduler_guard import scheduler_guard
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.models.remote import HUB
from siirl_dask.observe import Progress
from siirl_dask.rollout.specs import process_environment
from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes

logger = logging.getLogger("siirl_dask.driver")
_CLOSE_PATIENCE = 3.0  # seconds for workers to close by themselves after a complete run
# seconds for the same after a failure or Ctrl-C: the whole stop may take five seconds
_STOP_PATIENCE = 0.5
_CONNECT_TIMEOUT = 5.0  # seconds for a scheduler that has just started to answer
_INTERVAL = 0.5  # seconds between two attempts to connect
_CLOSE_TIMEOUT = 15.0  # seconds; what Dask has not closed by then is left to the end of the process
_PROFILE = {
    "distributed.worker.profile.interval": ("10ms", "100ms"),
    "distributed.admin.low-level-log-length": (1000, 100),
}
"""Dask's default and ours: its profiler kept 300 kB of stacks a second and worker, for a
thousand seconds."""


@contextmanager
def connect(
    config: Config,
    progress: Progress,
    *,
    security: Security | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Client]:
    """Yield a client of a cluster with ``cluster.workers`` workers; a cluster started here is
    closed afterwards.

    ``security`` has the certificates for an existing cluster; None: Dask's configuration names
    them. ``check`` is called while the workers of an existing cluster are waited for, and may
    raise.

    ConfigError if no scheduler answers at the given address, or no scheduler file comes; RunError
    if the workers do not come up in time.
    """
    cluster = config.cluster
    if cluster.exists:
        with _existing(cluster, progress, security, check) as client:
            yield client
        return
    if cluster.spec:
        with (
            dask.config.set(_common_settings(config)),
            main_not_imported(),
            deployed(cluster, progress) as client,
        ):
            yield client
        return
    with dask.config.set(_local_settings(config)), main_not_imported(), _local(config) as local:
        client = Client(local)
        try:
            wait_for_workers(client, cluster, progress)
            yield client
        finally:
            # the cluster is closed next: no orderly farewell is needed
            with suppress(TimeoutError):
                client.close(timeout=_STOP_PATIENCE)


@contextmanager
def _local(config: Config) -> Iterator[LocalCluster]:
    """Start a cluster on this machine, one process per worker, bound to loopback."""
    cluster = LocalCluster(
        n_workers=0,
        threads_per_worker=1,
        worker_class=NamelessNanny,
        host="127.0.0.1",
        dashboard_address=f"127.0.0.1:{config.observe.dashboard_port}",
        memory_limit=0,  # the model stays in memory: Dask must not pause or kill a worker for it
        silence_logs=logging.CRITICAL,
    )
    try:
        resource_tracker.ensure_running()  # started later, it would reset the signal mask set below
        cluster.sync(_prepare_processes)
        cluster.scale(config.cluster.workers)
        yield cluster
    except BaseException:
        _close(cluster, _STOP_PATIENCE)
        raise
    _close(cluster, _CLOSE_PATIENCE)


def _close(cluster: LocalCluster, patience: float) -> None:
    """Close the cluster; workers that are busy for more than ``patience`` seconds are killed, so
    none is left over.
    """
    nannies: list[Nanny] = processes_of(cluster)
    loop = cluster.loop
    assert loop is not None  # only a client without a loop of its own has none
    # it logs connections to killed workers, with tracebacks, and may do so after the cluster's
    # silence has ended
    logging.getLogger("distributed.batched").setLevel(logging.WARNING)
    late = threading.Timer(patience, loop.add_callback, [_kill, nannies])
    late.start()
    try:
        cluster.close(timeout=_CLOSE_TIMEOUT)
    except TimeoutError:  # the machine is very busy: the rest of Dask ends with this process
        logger.info("Dask did not close its cluster within %g s", _CLOSE_TIMEOUT)
        _kill(nannies)
    finally:
        late.cancel()


def _kill(nannies: Sequence[Nanny]) -> None:
    """Kill the worker processes, on the cluster's event loop, where no nanny acts between the
    two steps.
    """
    for nanny in nannies:
        if nanny.status is Status.running:
            nanny.close_gracefully(reason="siirl-dask-kill")  # or it would start another worker
        if nanny.pid:
            with suppress(ProcessLookupError):
                os.kill(nanny.pid, signal.SIGKILL)


async def _prepare_processes() -> None:
    """Start the fork server with SIGINT blocked.

    Ctrl-C reaches every process of the terminal. Processes that this thread starts inherit the mask
    and ignore it; the driver's main thread gets it and stops them in order.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    prepare_processes(dask.config.get("distributed.nanny.pre-spawn-environ"))


def _common_settings(config: Config) -> dict[str, object]:
    """Return Dask's settings for any cluster that a run starts."""
    environment: dict[str, object] = dict(dask.config.get("distributed.nanny.pre-spawn-environ"))
    for rollout in (config.rollout, *(agent.rollout for agent in config.agents.values())):
        for name, value in process_environment(rollout.engine).items():
            environment[name] = os.environ.get(name, value)
    is_offline = not config.model.path.startswith(HUB)
    environment["OMP_NUM_THREADS"] = config.cluster.threads
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE", int(is_offline))
    if config.cluster.device is DevicePreference.cpu:
        environment |= NO_ACCELERATORS
    settings: dict[str, object] = {
        "distributed.nanny.pre-spawn-environ": environment,
        "distributed.scheduler.allowed-failures": 0,
    }
    for key, (default, ours) in _PROFILE.items():
        if dask.config.get(key) == default:
            settings[key] = ours
    return settings


def _local_settings(config: Config) -> dict[str, object]:
    """Return Dask's settings for a cluster on this machine."""
    return {
        **_common_settings(config),
        "distributed.worker.multiprocessing-method": START_METHOD,
        "distributed.logging.distributed": "critical",
        # else Dask's cluster closes the nanny of a worker that died 15 s ago and is just starting
        # once more
        "distributed.deploy.lost-worker-timeout": "1 day",
    }


@contextmanager
def reconnect(
    config: Config,
    progress: Progress,
    *,
    security: Security | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Client]:
    """Yield a client of an existing cluster whose scheduler was lost, once another one has replaced
    it, with workers.

    RunError after ``cluster.scheduler_timeout`` seconds, SchedulerLost if that one ends as well. An
    elastic run waits for one worker only.
    """
    cluster = config.cluster
    deadline = time.monotonic() + cluster.scheduler_timeout
    progress.note(
        f"waiting for another scheduler, up to {cluster.scheduler_timeout:g} s "
        "(cluster.scheduler_timeout)"
    )
    client = _client_of_another(cluster, deadline, security, check)
    try:
        limit = ("cluster.scheduler_timeout", max(0.0, deadline - time.monotonic()))
        with scheduler_guard(client, cluster):
            want_workers(client, cluster)
            wait_for_workers(
                client,
                cluster,
                progress,
                check,
                limit=limit,
                workers=1 if cluster.elastic else None,
            )
        yield client
    finally:
        with _without_tracebacks(client), suppress(TimeoutError):
            client.close(timeout=_STOP_PATIENCE)


def _client_of_another(
    cluster: ClusterConfig,
    deadline: float,
    security: Security | None,
    check: Callable[[], None],
) -> Client:
    """Return a client of the scheduler that is at the address, or in the scheduler file, now."""
    while True:
        check()
        address = cluster.address
        try:
            if not address:
                address = address_in(cluster.scheduler_file or "")
            return _client(address, _CONNECT_TIMEOUT, security)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ) as error:  # no file, half a file, no scheduler
            if time.monotonic() >= deadline:
                where = f"which {cluster.scheduler_file!r} names: {address}"
                if cluster.address:
                    where = cluster.address
                raise RunError(
                    f"the scheduler was lost, and none came to its place ({where}) within "
                    f"cluster.scheduler_timeout={cluster.scheduler_timeout:g} s: {error}"
                ) from error
            time.sleep(_INTERVAL)


def _client(address: str | None, timeout: float, security: Security | None) -> Client:
    """Return a client of the scheduler at ``address``. One with the certificates of the caller's
    own client does not take that one's place as Dask's default.
    """
    if security is None:
        return Client(address=address, timeout=timeout)
    return Client(address=address, timeout=timeout, security=security, set_as_default=False)


@contextmanager
def _existing(
    cluster: ClusterConfig,
    progress: Progress,
    security: Security | None,
    check: Callable[[], None],
) -> Iterator[Client]:
    """Connect to an existing cluster, which stays when the client is closed."""
    address = cluster.address
    where = f"cluster.address={cluster.address!r}"
    if cluster.scheduler_file:
        address = read_address(cluster.scheduler_file, cluster.start_timeout, progress)
        where = f"{address!r}, which cluster.scheduler_file={cluster.scheduler_file!r} names"
    try:
        client = _client(address, cluster.start_timeout, security)
    except (
        OSError,
        ValueError,
        TypeError,
    ) as error:  # no scheduler; a malformed address; tls without certificates
        message = f"no Dask scheduler answers at {where}: {error}"
        hint = "; certificates are named in Dask's configuration, under distributed.comm.tls"
        raise ConfigError(message + (hint if "tls" in message.lower() else "")) from error
    try:
        with scheduler_guard(client, cluster):
            want_workers(client, cluster)
            wait_for_workers(client, cluster, progress, check, HINT)
        yield client
    finally:
        # a scheduler that is cut off does not answer
        with _without_tracebacks(client), suppress(TimeoutError):
            client.close(timeout=_STOP_PATIENCE)


@contextmanager
def _without_tracebacks(client: Client) -> Iterator[None]:
    """Keep a client that has lost its scheduler from printing a traceback: the run has reported
    the loss already.
    """
    log = logging.getLogger("distributed.client")
    before = log.level
    if client.status != "running":
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
