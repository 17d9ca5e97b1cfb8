"""The caller of a run brings more than configuration and DAG: a Dask client, a collection as the
dataset, and the means to follow the run and to end it, from other processes as well.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

from distributed import Client, Security

from siirl_dask.config import Config
from siirl_dask.dask_internals import SchedulerRpc, is_connected, largest_size
from siirl_dask.errors import ConfigError, counted
from siirl_dask.observe import Record
from siirl_dask.runs.owner import Owner

AFTER_STEP = "after step"
AT_ONCE = "at once"
_LISTENS = "a driver listens"
_SUBSCRIPTION = 0.1  # seconds for a message to come back that was logged after a subscription
_MOST_SUBSCRIPTIONS = 100


class Cancelled(KeyboardInterrupt):
    """The caller has cancelled the run at once."""


class StopRequest:
    """A request to end a run, from any thread."""

    def __init__(self) -> None:
        self.after_step = threading.Event()
        """Set: the run ends after the step under way, with a checkpoint."""
        self.at_once = threading.Event()
        """Set: the run ends without either."""

    def check(self) -> None:
        """Raise Cancelled if the run is to end at once."""
        if self.at_once.is_set():
            raise Cancelled


def _ignore(record: Record) -> None:
    pass


@dataclass(frozen=True, slots=True)
class RunCaller:
    """A client, a dataset, and the means to follow a run and to end it."""

    client: Client | None = None
    """A client of the cluster to train on. The run has one of its own there, with the same
    certificates, since it hangs up on a scheduler that is silent and cancels all of its futures."""
    data: object = None
    """A Dask collection whose rows are the dataset; None: it is at ``data.url`` already."""
    stop: StopRequest = field(default_factory=StopRequest)
    on_record: Callable[[Record], None] = _ignore
    """Called with the record of each step and validation, in the driver's thread."""

    @property
    def security(self) -> Security | None:
        """The certificates of the caller's client; None: those of Dask's configuration."""
        return None if self.client is None else self.client.security

    def on_its_cluster(self, config: Config) -> Config:
        """Return the configuration with the scheduler of the caller's client. ConfigError where
        the configuration names another cluster, the client is not connected, or its cluster will
        never have enough workers.
        """
        if self.client is None:
            return config
        cluster = config.cluster
        address = scheduler_address(self.client)
        for key, value in {
            "address": cluster.address,
            "scheduler_file": cluster.scheduler_file,
            "spec": cluster.spec,
        }.items():
            if value is not None and value != address:
                raise ConfigError(
                    f"client= is of the cluster at {address}, and cluster.{key}={value!r} names "
                    f"another: leave cluster.{key} out"
                )
        _check_size(self.client, cluster.workers)
        return replace(config, cluster=replace(cluster, address=address))


def scheduler_address(client: Client) -> str:
    """Return the address of a client's scheduler. ConfigError where it is not connected."""
    if not is_connected(client):
        raise ConfigError(
            f"client={client!r} is not connected: expected a client of a running cluster; one "
            "that is asynchronous connects with `client = await Client(..., asynchronous=True)`"
        )
    return SchedulerRpc(client).address


def _check_size(client: Client, workers: int) -> None:
    """Raise ConfigError for a cluster of this program's that nothing enlarges: it would be waited
    for in vain.
    """
    most = largest_size(client.cluster)
    if most is None or most >= workers:
        return
    fewer = f"set cluster.workers={most}, or " if most else ""
    raise ConfigError(
        f"cluster.workers={workers}, and the cluster of client= has {counted(most, 'worker')} and "
        f"is not going to have more: {fewer}enlarge it first, by cluster.scale({workers}) or "
        f"cluster.adapt(Adaptive=siirl_dask.Adaptive, maximum={workers})"
    )


# A run is ended from another process by a message on a topic of the scheduler's, which reaches its
# driver. Each start has a topic of its own, named by its token in the run's folder: who cannot read
# the folder cannot end the run, and a message is for no other start, nor for another run of that
# path. A driver on the cluster has one more from its submission on, before it has the folder.


def topic_of(start: Owner) -> str:
    return f"siirl-stop-{sha256(start.token.encode()).hexdigest()[:32]}"


def listen(client: Client, topic: str, stop: StopRequest) -> None:
    """Pass what others have sent, and will send, on a topic on to ``stop``; anything else is
    ignored.
    """

    is_subscribed = threading.Event()

    def handle(event: tuple[float, Any]) -> None:
        _, message = event
        if message == _LISTENS:
            is_subscribed.set()
        if message == AT_ONCE:
            stop.at_once.set()
        if message in (AFTER_STEP, AT_ONCE):
            stop.after_step.set()

    client.subscribe_topic(topic, handle)
    # a call may overtake the subscription: what others send between the two would reach nobody
    for _ in range(_MOST_SUBSCRIPTIONS):
        client.log_event(topic, _LISTENS)
        if is_subscribed.wait(_SUBSCRIPTION):
            break
    for event in client.get_events(topic):  # sent before, while workers were waited for
        handle(event)


async def send(client: Client, topic: str, how: str) -> None:
    """Ask the driver that listens on a topic to end, ``how`` being one of the words above."""
    await SchedulerRpc(client).call("log_event", topic=topic, msg=how)


async def send_to_listener(client: Client, topic: str, how: str) -> None:
    """Send as ``send`` does. ConfigError where no driver listens on the topic: the client is of
    another cluster, or the driver still waits for its workers, and gets the message then.
    """
    await send(client, topic, how)
    scheduler = SchedulerRpc(client)
    events = await scheduler.call("events", topic=topic)
    if not any(message == _LISTENS for _, message in events):
        raise ConfigError(
            f"no driver of the run listens on the cluster of client=, at {scheduler.address}: give "
            "attach() a client of the cluster that the run trains on; a driver that still waits "
            "for its workers there has the message when they have come"
        )
