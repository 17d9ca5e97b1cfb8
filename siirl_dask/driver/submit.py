"""``submit`` trains in the background, from a notebook, a script or a running event loop, and
``attach`` takes up a run that another process trains.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from distributed import Client
from siirl_storage import open_fs

from siirl_dask.config.file import ConfigSource
from siirl_dask.dask_internals import start_on_loop
from siirl_dask.driver.caller import (
    AFTER_STEP,
    AT_ONCE,
    RunCaller,
    StopRequest,
    scheduler_address,
    send_to_listener,
    topic_of,
)
from siirl_dask.driver.clusters.driver_task import ClusterDriver
from siirl_dask.driver.feed import RunFeed
from siirl_dask.driver.handle import RunHandle
from siirl_dask.driver.requested import DATA_URL, Recipe, RequestedRun, requested_run
from siirl_dask.driver.run import train
from siirl_dask.errors import ConfigError, DataError, Interrupted, RunError
from siirl_dask.observe import Status, Summary, read_metrics, read_summary
from siirl_dask.planner import DAG, Phase
from siirl_dask.runs.attempt import RunStart, newest_start, summary_is_older
from siirl_dask.runs.reader import open_run

logger = logging.getLogger("siirl_dask.driver")

HERE = "here"
ON_CLUSTER = "cluster"
_INTERVAL = 0.5  # seconds between two looks at the folder of a run that another process trains
_SEND_TIMEOUT = 10.0  # seconds for the scheduler to take a message
_PATIENCE = 120.0  # seconds in which a store that cannot be read is asked again


def submit(
    config: ConfigSource,
    dag: DAG | Recipe | None = None,
    validation: DAG | Recipe | None = None,
    *,
    client: Client,
    data: object = None,
    driver: str = HERE,
    fresh: bool = False,
    force: bool = False,
) -> RunHandle:
    """Train as ``run`` does, on the cluster of ``client``, and return a handle at once.

    The run's driver is a thread of this process with a client of its own; ``client``, which may be
    asynchronous, stays free for other work. Nothing is printed but errors. The run ends with this
    process: the same call goes on from its last checkpoint and its stored rows.

    With ``driver="cluster"`` it is a task on one of the cluster's workers, and the run goes on
    without this process; ``attach`` takes it up again. The workers need what this process reads:
    the modules of functions, and the folders and stores of models and data.

    ConfigError for what can be seen to be wrong at once; the handle raises everything else.
    """
    if driver not in (HERE, ON_CLUSTER):
        raise ConfigError(f"driver={driver!r}: expected {HERE!r} or {ON_CLUSTER!r}")
    scheduler_address(client)
    data_url = None if data is None else DATA_URL
    requested = requested_run(config, dag, validation, data_url=data_url)
    quiet = replace(requested.config.observe, progress=False)
    requested = replace(requested, config=replace(requested.config, observe=quiet))
    RunCaller(client=client).on_its_cluster(requested.config)
    if driver == ON_CLUSTER:
        remote = ClusterDriver(client, requested, data, fresh=fresh, force=force)
        return RunHandle(remote.url, remote.start(), remote.cancel)
    feed = RunFeed()
    stop = StopRequest()
    caller = RunCaller(client=client, data=data, stop=stop, on_record=feed.add)
    handle = RunHandle(requested.config.run.url, feed, partial(_stop_here, stop))
    arguments = {"fresh": fresh, "force": force}
    work = partial(_train, requested, caller, feed, **arguments)
    threading.Thread(target=work, name="siirl-driver", daemon=True).start()
    return handle


def attach(url: str, client: Client | None = None) -> RunHandle:
    """Return a handle of the run in the folder ``url``, which any process has submitted or still
    trains; one that has ended has its end already.

    The handle reads the run's files. It needs ``client``, one of the cluster that the run trains
    on, to cancel it and for nothing else. ConfigError where there is no run.
    """
    open_run(url)
    feed = RunFeed()
    handle = RunHandle(url, feed, partial(_stop_elsewhere, url, client))
    work = partial(_follow, handle.url, feed)
    threading.Thread(target=work, name="siirl-attach", daemon=True).start()
    return handle


def _train(
    requested: RequestedRun,
    caller: RunCaller,
    feed: RunFeed,
    *,
    fresh: bool,
    force: bool,
) -> None:
    """Train in this thread, and tell the feed how it ended."""
    try:
        feed.finish(train(requested, caller, fresh=fresh, force=force))
    except KeyboardInterrupt:
        feed.finish(Interrupted("cancelled before the run had begun"))
    except BaseException as error:  # whatever it is, who waits for the handle gets it
        feed.finish(error)


def _stop_here(stop: StopRequest, at_once: bool) -> None:
    if at_once:
        stop.at_once.set()
    stop.after_step.set()


def _stop_elsewhere(url: str, client: Client | None, at_once: bool) -> None:
    """Send a message to the run's driver. ConfigError without a client, and for one of another
    cluster.
    """
    if client is None:
        raise ConfigError(
            f"the run at {url!r} is trained by another process: give attach() a client of its "
            "cluster to cancel it"
        )
    scheduler_address(client)
    start = newest_start(url)
    if start is None:
        raise ConfigError(f"the run at {url!r} was never started: there is nothing to cancel")
    how = AFTER_STEP
    if at_once:
        how = AT_ONCE
    topic = topic_of(start.owner)
    sending = start_on_loop(client, send_to_listener(client, topic, how))
    if client.asynchronous:  # this thread may be the one that sends it
        sending.add_done_callback(partial(_log_failure, url))
    else:
        sending.result(_SEND_TIMEOUT)


def _log_failure(url: str, sending: Future[None]) -> None:
    if not sending.cancelled() and sending.exception() is not None:
        logger.error("the run at %r was not cancelled: %r", url, sending.exception())


def _follow(url: str, feed: RunFeed) -> None:
    """Read the records of a run until it ends, and tell the feed of each once."""
    try:
        new_records = _NewRecords(url)
        watch = _Watch(url)
        while not watch.sees_the_end(new_records, feed):
            time.sleep(_INTERVAL)
        feed.finish(_outcome(url))
    except Exception as error:  # each store has errors of its own; who waits must not wait for ever
        feed.finish(error)


class _NewRecords:
    """Reads ``metrics.jsonl`` again where it has grown."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._size = -1
        self._seen: set[tuple[Phase, int]] = set()

    def read(self, feed: RunFeed) -> None:
        """Add the records that were not there before."""
        fs, path = open_fs(f"{self._url.rstrip('/')}/metrics.jsonl")
        fs.invalidate_cache()
        try:
            size = int(fs.info(path)["size"])
            records = []
            if size != self._size:
                records = read_metrics(self._url)
        except (FileNotFoundError, DataError):  # no step is done yet
            return
        self._size = size
        for record in records:
            key = (record["phase"], record["step"])
            if key not in self._seen:
                self._seen.add(key)
                feed.add(record)


class _Watch:
    """Finds out whether the process that trains a run is gone. Errors of the store are waited out
    for a while: the run goes on meanwhile.
    """

    def __init__(self, url: str, now: Callable[[], float] = time.monotonic) -> None:
        self._url = url
        self._now = now
        self._last: RunStart | None = None
        self._since = now()
        self._read_at = now()

    def sees_the_end(self, records: _NewRecords, feed: RunFeed) -> bool:
        """Look once, add new records to the feed, and return whether the run is over. Whatever the
        store raises, once it has done so for two minutes.
        """
        try:
            over = self._is_over()
            records.read(feed)  # those of a run that is over are all there
        except Exception as error:
            if self._now() - self._read_at > _PATIENCE:
                raise
            logger.warning("%s cannot be read, and is tried again: %r", self._url, error)
            return False
        self._read_at = self._now()
        return over

    def _is_over(self) -> bool:
        """Return whether the newest start has ended, or gave no sign of life within twice its
        lease.
        """
        start = newest_start(self._url)
        if start is None or start.is_over:
            return True
        if start != self._last:
            self._last = start
            self._since = self._now()
        return self._now() - self._since > 2 * start.owner.lease


def _outcome(url: str) -> Summary | Exception:
    """Return the summary of a run that has ended, or the error that it ended with."""
    try:
        summary = read_summary(url)
        is_of_earlier_start = summary_is_older(url)
    except (FileNotFoundError, DataError) as error:
        return RunError(f"the process that trained {url!r} is gone, without a summary: {error}")
    if is_of_earlier_start:
        return RunError(
            f"the newest start of the run at {url!r} ended before it had begun; the process that "
            "started it has said why"
        )
    if summary.status is Status.COMPLETE:
        return summary
    text = str(summary.error)
    if summary.status is Status.INTERRUPTED:
        return Interrupted(text)
    return RunError(text)
