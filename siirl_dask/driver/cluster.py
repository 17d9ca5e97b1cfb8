"""The Dask cluster of a run: processes started on this machine, or an existing cluster."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

import dask
from distributed import Client, LocalCluster, Nanny, Status

from siirl_dask.config import ClusterConfig, Config, Engine
from siirl_dask.errors import ConfigError, RunError
from siirl_dask.rollout.vllm_engine.process import ENVIRONMENT
from siirl_dask.worker.fork_server import START_METHOD, prepare_processes

logger = logging.getLogger("siirl_dask.driver")
_PATIENCE = 3.0  # seconds that workers have to close by themselves after a run that is complete
_HASTE = 0.5  # the same after a failure or Ctrl-C, which has to be over within five
_CLOSE_TIMEOUT = 15.0  # seconds; what Dask has not closed by then is left to the end of the process


@contextmanager
def connect(config: Config) -> Iterator[Client]:
    """A client of a cluster with ``cluster.workers`` workers; one that was started here is closed on the way out."""
    cluster = config.cluster
    if cluster.address or cluster.scheduler_file:
        with _existing(cluster) as client:
            yield client
        return
    with dask.config.set(_local_settings(config)), _local(config) as local:
        client = Client(local)
        try:
            _wait_for_workers(client, cluster)
            yield client
        finally:
            with suppress(TimeoutError):  # the cluster goes with it: there is nothing to take leave of
                client.close(timeout=_HASTE)


def members(client: Client, count: int) -> dict[str, str]:
    """{name: address} of the first ``count`` workers, in the order of their names: the run's rank order."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    named = {str(worker["name"]): address for address, worker in workers.items()}
    order = sorted(named, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    return {name: named[name] for name in order[:count]}


@contextmanager
def _local(config: Config) -> Iterator[LocalCluster]:
    """One process a worker, everything bound to loopback."""
    cluster = LocalCluster(
        n_workers=0,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address=f"127.0.0.1:{config.observe.dashboard_port}",
        memory_limit=0,  # the model is there for good: Dask must not pause or kill a worker for it
        silence_logs=logging.CRITICAL,
    )
    try:
        resource_tracker.ensure_running()  # started later, it would take the mask below off again
        cluster.sync(_prepare_processes)
        cluster.scale(config.cluster.workers)
        yield cluster
    except BaseException:
        _close(cluster, _HASTE)
        raise
    _close(cluster, _PATIENCE)


def _close(cluster: LocalCluster, patience: float) -> None:
    """Close in order; a worker that is busy for more than ``patience`` seconds is killed, and none is left over."""
    nannies, loop = list(cluster.workers.values()), cluster.loop
    assert loop is not None  # only a client without a loop of its own has none
    late = threading.Timer(patience, loop.add_callback, [_kill, nannies])
    late.start()
    try:
        cluster.close(timeout=_CLOSE_TIMEOUT)
    except TimeoutError:
        logger.warning("Dask did not close its cluster in %g s: what is left ends with this process", _CLOSE_TIMEOUT)
    finally:
        late.cancel()


def _kill(nannies: Sequence[Nanny]) -> None:
    """Kill the worker processes; runs on the cluster's event loop, where no nanny can act between the two steps."""
    for nanny in nannies:
        if nanny.status is Status.running:
            nanny.close_gracefully(reason="siirl-dask-kill")  # or it would start the worker anew
        if nanny.pid:
            with suppress(ProcessLookupError):
                os.kill(nanny.pid, signal.SIGKILL)


async def _prepare_processes() -> None:
    """Ctrl-C reaches every process of the terminal. Those that this thread starts inherit the mask and live on; the
    driver, whose main thread is not masked, hears it and stops them in order.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    prepare_processes(dask.config.get("distributed.nanny.pre-spawn-environ"))


def _local_settings(config: Config) -> dict[str, object]:
    of_engine = {} if config.rollout.engine is Engine.transformers else ENVIRONMENT
    return {
        "distributed.nanny.pre-spawn-environ": {
            **dask.config.get("distributed.nanny.pre-spawn-environ"),
            **{name: os.environ.get(name, value) for name, value in of_engine.items()},
            "OMP_NUM_THREADS": config.cluster.threads,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": 1,
        },
        "distributed.worker.multiprocessing-method": START_METHOD,
        "distributed.scheduler.allowed-failures": 0,
        "distributed.logging.distributed": "critical",
    }


@contextmanager
def _existing(cluster: ClusterConfig) -> Iterator[Client]:
    try:
        client = Client(address=cluster.address, scheduler_file=cluster.scheduler_file, timeout=cluster.start_timeout)
    except (OSError, ValueError, TypeError) as error:  # nobody there; an address that is none; tls without certificates
        where = f"cluster.address={cluster.address!r}" if cluster.address else f"{cluster.scheduler_file!r}"
        told = f"no Dask scheduler answers at {where}: {error}"
        hint = "; certificates are named in Dask's configuration, under distributed.comm.tls"
        raise ConfigError(told + (hint if "tls" in told.lower() else "")) from error
    with client:
        _wait_for_workers(client, cluster)
        yield client


def _wait_for_workers(client: Client, cluster: ClusterConfig) -> None:
    try:
        client.wait_for_workers(cluster.workers, timeout=cluster.start_timeout)
    except TimeoutError as error:
        up = len(client.scheduler_info(n_workers=-1)["workers"])
        raise RunError(
            f"{up} of {cluster.workers} workers came up within cluster.start_timeout={cluster.start_timeout:g} s"
        ) from error
