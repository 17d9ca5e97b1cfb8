"""Starts the Dask cluster that ``cluster.spec`` names, and ends it with the run.

Dask's deployment projects do the work: a spec names any class that is a
``distributed.deploy.Cluster``, or a function that returns one, such as ``distributed.SSHCluster``.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from importlib import import_module
from inspect import isclass, signature
from typing import Any, get_type_hints

import dask
from distributed import Client, SpecCluster, Status
from distributed.deploy.cluster import Cluster

from siirl_dask.config import ClusterConfig
from siirl_dask.config.file import ClusterSpec, read_cluster_spec
from siirl_dask.dask_internals import (
    can_scale,
    jobs_without_workers,
    parse_timedelta,
    processes_of,
    scale,
    start_on_loop,
)
from siirl_dask.driver.clusters.wait_for_workers import wait_for_workers
from siirl_dask.driver.recovery.scheduler_guard import scheduler_guard
from siirl_dask.errors import ConfigError, RunError, SiirlError, clause, did_you_mean
from siirl_dask.observe import Progress

logger = logging.getLogger("siirl_dask.driver")
_CLOSE_TIMEOUT = 15.0  # seconds until the workers are ended one by one, without the scheduler
_CLIENT_TIMEOUT = 0.5  # seconds for the client's farewell: the cluster is closed next
_LOGS_OF_A_CLOSE = ("distributed.batched", "distributed.deploy.cluster")
"""Dask's logs of workers that come or go while a cluster closes, with tracebacks, also after it
has closed."""
_RESTART_MARGIN = 1.0  # seconds after Dask has forgotten a lost worker
_LOG_LINES = 5  # of Dask's own log, in the error of a cluster that does not start


def check_spec(path: str) -> None:
    """Raise ConfigError unless the file names a class that can be imported here, and arguments
    that it accepts.
    """
    _factory(read_cluster_spec(path))


@contextmanager
def deployed(config: ClusterConfig, progress: Progress) -> Iterator[Client]:
    """Start what ``cluster.spec`` describes, wait for ``cluster.workers`` workers, and yield a
    client.

    The cluster is closed afterwards, whatever happens. ConfigError for a spec that cannot be used;
    RunError if the cluster does not start, or too few workers come in time.
    """
    assert config.spec is not None
    spec = read_cluster_spec(config.spec)
    cluster = _start(spec, config.start_timeout)
    try:
        scaling = _scale(cluster, config.workers)

        def check() -> None:
            error = None
            if scaling.done():
                error = scaling.exception()
            if error is not None:
                raise _start_failure(spec, error) from error

        client = Client(cluster)
        try:
            with scheduler_guard(client, config):
                wait_for_workers(client, config, progress, check, _hint(spec, cluster))
            yield client
        finally:
            with suppress(TimeoutError):  # a scheduler that is cut off does not answer
                client.close(timeout=_CLIENT_TIMEOUT)
    finally:
        _close(cluster)


def start_lost(cluster: Cluster, workers: int, lost: Collection[str] = ()) -> None:
    """Start workers of a cluster in place of those that are lost for good, such as those of a host
    without power.

    ``lost`` are their names. Returns at once. Dask waits for a lost worker before it forgets it
    (``distributed.deploy.lost-worker-timeout``), and a class without scaling starts none.
    """
    patience = parse_timedelta(dask.config.get("distributed.deploy.lost-worker-timeout"))

    def start() -> None:
        if cluster.status is not Status.running:
            return
        if isinstance(cluster, SpecCluster):
            cluster.sync(_forget, cluster, lost)
        _scale(cluster, workers).add_done_callback(warn)

    def warn(started: Future[None]) -> None:
        error = started.exception()
        if error is not None:
            logger.warning(
                "%s cannot start a worker in place of a lost one: %s", cluster.name, error
            )

    timer = threading.Timer(patience + _RESTART_MARGIN, start)
    timer.daemon = True
    timer.start()


async def _forget(cluster: SpecCluster, lost: Collection[str]) -> None:
    """End and forget each job of which no worker is left: Dask does so by itself only where a
    job has a single one.
    """
    for job, process in jobs_without_workers(cluster, lost):
        try:
            await process.close()
        except Exception as error:  # whatever the command that ends a job gives
            logger.warning(
                "%s cannot end the job %s, whose workers are lost: %s", cluster.name, job, error
            )


def _factory(spec: ClusterSpec) -> Callable[[], Cluster]:
    """Return a function that makes the cluster. ConfigError for a class or arguments that cannot
    be used.
    """
    where = f"cluster.spec={spec.path!r}: class {spec.class_name!r}"
    module_name, _, name = spec.class_name.rpartition(".")
    try:
        with _unchanged_sigint():
            module = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{where} cannot be imported: {clause(error)}; install the package that has it"
        ) from error
    factory = getattr(module, name, None)
    if factory is None:
        raise ConfigError(
            f"{where}: module {module_name!r} has no {name!r}{did_you_mean(name, dir(module))}"
        )
    kind: Any = None
    if isclass(factory):
        kind = factory
    elif callable(factory):
        kind = get_type_hints(factory).get("return")
    if not isclass(kind) or not issubclass(kind, Cluster):
        raise ConfigError(
            f"{where} is no cluster: expected a class of distributed.deploy.Cluster, as "
            "SLURMCluster is"
        )
    if "asynchronous" in spec.kwargs:
        raise ConfigError(
            f"{where}: kwargs.asynchronous: a run starts its cluster synchronously; leave it out"
        )
    parameters = signature(factory).parameters
    try:
        signature(factory).bind(**spec.kwargs)
    except TypeError as error:
        unknown = next((key for key in spec.kwargs if key not in parameters), None)
        hint = ""
        if unknown:
            hint = did_you_mean(unknown, parameters)
        raise ConfigError(f"{where} does not take its kwargs: {error}{hint}") from error
    return lambda: factory(**spec.kwargs)


@contextmanager
def _unchanged_sigint() -> Iterator[None]:
    """Keep this process's handler of SIGINT: importing dask_jobqueue sets one of its own, which
    exits with 0.
    """
    # no other may set a handler: nor may the import
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _start(spec: ClusterSpec, timeout: float) -> Cluster:
    """Make the cluster in a thread of its own.

    Some classes wait there for all their hosts, and would leave some behind if Ctrl-C ended them
    half-way.
    """
    make_cluster = _factory(spec)
    made = Future[Cluster]()

    def work() -> None:
        try:
            made.set_result(make_cluster())
        except BaseException as error:
            made.set_exception(error)

    with _dask_log() as lines:
        threading.Thread(target=work, name="start-cluster", daemon=True).start()
        try:
            wait([made], timeout)
        except KeyboardInterrupt:
            wait([made], _CLOSE_TIMEOUT)
            made.add_done_callback(_close_unused)
            raise
        if not made.done():
            made.add_done_callback(_close_unused)
            raise RunError(
                f"cluster.spec={spec.path!r}: {spec.class_name} did not start within "
                f"cluster.start_timeout={timeout:g} s{_quoted(lines)}"
            )
        error = made.exception()
        if error is not None:
            raise _start_failure(spec, error, lines) from error
        return made.result()


def _close_unused(made: Future[Cluster]) -> None:
    if made.exception() is None:
        _close(made.result())


def _start_failure(
    spec: ClusterSpec, error: BaseException, lines: Iterable[str] = ()
) -> SiirlError:
    """Return the error of a cluster that does not start; a class refuses arguments with
    TypeError or ValueError.
    """
    text = " ".join(str(error).split())
    if not text:
        text = type(error).__name__
    where = f"cluster.spec={spec.path!r}: {spec.class_name}"
    if isinstance(error, TypeError | ValueError):
        return ConfigError(f"{where} refuses its kwargs: {text}")
    return RunError(f"{where} does not start: {text}{_quoted(lines)}")


def _quoted(lines: Iterable[str]) -> str:
    shown = "; ".join(lines)
    if shown:
        return f" (Dask's log: {shown})"
    return ""


@contextmanager
def _dask_log() -> Iterator[deque[str]]:
    """Keep the log of Dask's deployment classes off the terminal, and yield its last lines.

    They explain a failure better than the exception does.
    """
    lines: deque[str] = deque(maxlen=_LOG_LINES)

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if " - INFO - " not in text:  # a line of another host's log about no error
                lines.append(text)

    log = logging.getLogger("distributed.deploy")
    handler = Collector()
    propagated = log.propagate
    log.addHandler(handler)
    log.propagate = False
    try:
        yield lines
    finally:
        log.propagate = propagated
        log.removeHandler(handler)


def _scale(cluster: Cluster, workers: int) -> Future[None]:
    """Ask for the workers; the future fails if one cannot be started.

    A class without scaling has as many as its arguments set.
    """
    done = Future[None]()
    done.set_result(None)
    if not can_scale(cluster):
        return done
    if not isinstance(cluster, SpecCluster):
        cluster.scale(workers)
        return done
    return start_on_loop(cluster, scale(cluster, workers))


def _hint(spec: ClusterSpec, cluster: Cluster) -> str:
    """Return where to look when workers do not start."""
    hint = f": {spec.class_name} starts them"
    if not can_scale(cluster):
        hint += ", as many as its kwargs name and no more"
    folder = spec.kwargs.get("log_directory")
    if folder is not None:
        hint += f", and their logs are in {folder}"
    return hint


def no_replacement(spec: str, cluster: Cluster) -> str:
    """Return advice for a class that starts no worker in place of a lost one; an empty text for
    any other.
    """
    if can_scale(cluster):
        return ""
    return (
        f": the class of cluster.spec={spec!r} starts none in place of a lost one; start one with "
        f"`dask worker {cluster.scheduler_address}`, begin with more workers than cluster.workers, "
        "or set cluster.elastic=true"
    )


def _close(cluster: Cluster) -> None:
    """Close the cluster; where its scheduler is gone, or a worker too busy, the workers are
    ended one by one.
    """
    for name in _LOGS_OF_A_CLOSE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        cluster.close(timeout=_CLOSE_TIMEOUT)
    except OSError as error:  # also a TimeoutError
        logger.warning(
            "%s does not close (%s): its workers are ended", cluster.name, error or "no answer"
        )
        cluster.sync(_end_workers, cluster, callback_timeout=_CLOSE_TIMEOUT)


async def _end_workers(cluster: Cluster) -> None:
    """End each job or process of the cluster by its own means, such as scancel."""
    await asyncio.gather(*(process.close() for process in processes_of(cluster)))
