"""Ends a run from another process: a message on a topic of the scheduler's reaches its driver.

Each start has a topic of its own, named by its token in the run's folder: who cannot read the
folder cannot end the run, and a message is for no other start, nor for another run of that path. A
driver on the cluster has one more from its submission on, before it has the folder.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from distributed import Client

from siirl_dask.dask_internals import SchedulerRpc
from siirl_dask.driver.caller import StopRequest
from siirl_dask.runs.holder import Holder

AFTER_STEP = "after step"
AT_ONCE = "at once"


def topic_of(start: Holder) -> str:
    return f"siirl-stop-{sha256(start.token.encode()).hexdigest()[:32]}"


def listen(client: Client, topic: str, stop: StopRequest) -> None:
    """Pass what others have sent, and will send, on a topic on to ``stop``; anything else is
    ignored.
    """

    def handle(event: tuple[float, Any]) -> None:
        _, message = event
        if message == AT_ONCE:
            stop.at_once.set()
        if message in (AFTER_STEP, AT_ONCE):
            stop.after_step.set()

    client.subscribe_topic(topic, handle)
    for event in client.get_events(topic):  # sent before, while workers were waited for
        handle(event)


async def send(client: Client, topic: str, how: str) -> None:
    """Ask the driver that listens on a topic to end, ``how`` being one of the words above."""
    await SchedulerRpc(client).call("log_event", topic=topic, msg=how)
