"""Ends a run from another process: a message on a topic of the scheduler's reaches its driver."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

from distributed import Client
from siirl_storage.files import absolute

from siirl_dask.driver.caller import StopRequest

AFTER_STEP = "after step"
AT_ONCE = "at once"


def topic_of(url: str) -> str:
    """Return the topic of the run at ``url``."""
    return f"siirl-stop-{sha256(absolute(url).encode()).hexdigest()[:16]}"


def listen(client: Client, url: str, stop: StopRequest) -> None:
    """Pass what others send about the run at ``url`` on to ``stop``; anything else is ignored."""

    def handle(event: tuple[float, Any]) -> None:
        _, message = event
        if message == AT_ONCE:
            stop.at_once.set()
        if message in (AFTER_STEP, AT_ONCE):
            stop.after_step.set()

    client.subscribe_topic(topic_of(url), handle)


async def send(client: Client, url: str, how: str) -> None:
    """Ask the driver of the run at ``url`` to end it, ``how`` being one of the words above."""
    assert client.scheduler is not None  # whoever calls has looked
    await client.scheduler.log_event(topic=topic_of(url), msg=how)
