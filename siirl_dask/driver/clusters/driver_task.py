"""The driver of a run as a task of its cluster: the run goes on when the process that has submitted
it ends, as a notebook's kernel does.

The task leaves the threads of its worker to others, and is no client's, so that it is not cancelled
with one. Where its worker is lost, Dask starts it on another, and the run goes on from its last
checkpoint and its stored rows.
"""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from dask.delayed import Delayed
from distributed import Client, Security, fire_and_forget, get_worker, secede
from distributed import Future as DaskFuture
from siirl_storage import absolute

from siirl_dask.dask_internals import security_of, start_on_loop
from siirl_dask.driver.caller import (
    AFTER_STEP,
    AT_ONCE,
    RunCaller,
    StopRequest,
    listen,
    send,
)
from siirl_dask.driver.collection import Collection
from siirl_dask.driver.feed import RunFeed
from siirl_dask.driver.requested import RequestedRun
from siirl_dask.driver.run import train
from siirl_dask.errors import ConfigError, Interrupted, RunError
from siirl_dask.observe import Record, Summary
from siirl_dask.pickling import dumps
from siirl_dask.planner import Phase
from siirl_dask.scheduler import DRIVERS

_END = "end"  # message after the last record of a driver
_LAST_RECORDS = 10.0  # seconds for those that the scheduler has not passed on yet


@dataclass(frozen=True, slots=True)
class _Job:
    """A run for a driver on the cluster."""

    requested: RequestedRun
    data: list[Delayed] | None
    topic: str
    """Dask's topic of its records."""
    fresh: bool
    force: bool

    @property
    def stop_topic(self) -> str:
        """Dask's topic of messages that end it."""
        return f"{self.topic}-stop"


class ClusterDriver:
    """The submitting side: passes what the driver says on to a feed, and orders to the driver."""

    def __init__(
        self,
        client: Client,
        requested: RequestedRun,
        data: object,
        *,
        fresh: bool,
        force: bool,
    ) -> None:
        """ConfigError for a dataset that would end with the client."""
        self._client = client
        self._feed = RunFeed()
        self._ended = asyncio.Event()
        self.url = absolute(requested.config.run.url)  # workers may run in other folders
        config = replace(
            requested.config,
            run=replace(requested.config.run, url=self.url),
            # the driver is on the cluster, and may reach its scheduler at another address
            cluster=replace(requested.config.cluster, address=None),
        )
        self._job = _Job(
            requested=replace(requested, config=config),
            data=None if data is None else _delayed(data),
            topic=f"{DRIVERS}{uuid4().hex}",
            fresh=fresh,
            force=force,
        )

    def start(self) -> RunFeed:
        """Submit the driver, and return what it says from then on."""
        client = self._client
        client.subscribe_topic(self._job.topic, self._take)
        task = client.submit(drive, dumps(self._job), key=self._job.topic, pure=False)
        fire_and_forget(task)
        start_on_loop(client, self._outcome(task)).add_done_callback(self._finish)
        return self._feed

    def cancel(self, at_once: bool) -> None:
        """Order the driver to end the run."""
        how = AFTER_STEP
        if at_once:
            how = AT_ONCE
        start_on_loop(self._client, send(self._client, self._job.stop_topic, how))

    def _take(self, event: tuple[float, Any]) -> None:
        match event[1]:
            case {
                "step": int(step),
                "phase": str(phase),
                "seconds": float(seconds),
                "metrics": dict(metrics),
            } if phase in set(Phase):
                record = Record(step=step, phase=Phase(phase), seconds=seconds, metrics=metrics)
                self._feed.add(record)
            case message if message == _END:
                self._ended.set()

    async def _outcome(self, task: DaskFuture[Summary]) -> Summary:
        try:
            (summary,) = await self._client.gather([task], asynchronous=True)
        except CancelledError:  # the client closes, and its event loop ends
            raise
        except Exception:
            await self._last_records()
            raise
        await self._last_records()
        result: Summary = summary
        return result

    async def _last_records(self) -> None:
        with suppress(TimeoutError):  # what does not come is in the run's folder
            await asyncio.wait_for(self._ended.wait(), _LAST_RECORDS)

    def _finish(self, outcome: Future[Summary]) -> None:
        try:
            self._feed.finish(outcome.result())
        except CancelledError:
            self._feed.finish(
                RunError(
                    "the client that has submitted the run is closed, or has lost its scheduler; "
                    f"siirl_dask.attach({self.url!r}) follows the run"
                )
            )
        except Exception as error:  # whatever has ended the run, who waits for the handle gets it
            self._feed.finish(error)


def drive(packed: bytes) -> Summary:
    """Train a packed job in a task of Dask's. Raises what ends the run."""
    secede()
    worker = get_worker()
    address = str(worker.scheduler.address)
    security = security_of(worker)
    # a thread in which nothing is of this task: Dask gives all tasks that a task submits the same
    # priority, and a worker would begin with any step
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="siirl-driver") as threads:
        return threads.submit(_drive, packed, address, security).result()


def _drive(packed: bytes, address: str, security: Security) -> Summary:
    job: _Job = pickle.loads(packed)
    with Client(address, security=security, set_as_default=False) as client:
        stop = StopRequest()
        listen(client, job.stop_topic, stop)
        # a driver after one that was lost goes on from there
        has_begun = bool(client.get_metadata([job.topic], default=False))
        caller = RunCaller(
            client=client,
            data=job.data,
            stop=stop,
            on_record=partial(_report, client, job.topic),
        )
        try:
            return train(job.requested, caller, fresh=job.fresh and not has_begun, force=job.force)
        except KeyboardInterrupt:
            raise Interrupted("cancelled before the run had begun") from None
        finally:
            client.log_event(job.topic, _END)


def _report(client: Client, topic: str, record: Record) -> None:
    client.set_metadata([topic], True)
    client.log_event(topic, {**record, "phase": str(record["phase"])})


def _delayed(data: object) -> list[Delayed]:
    """Return the partitions of a collection. ConfigError for futures, which end with their client."""
    partitions = Collection.of(data).partitions
    if any(not isinstance(partition, Delayed) for partition in partitions):
        raise ConfigError(
            "data= has futures, which end with the client that made them, and driver='cluster' goes "
            "on without it: give a dask.dataframe, a bag or delayed values"
        )
    return list(partitions)
