"""Notices that the scheduler is gone or that this machine is cut off from it: Dask's client is silent for minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from distributed import Client
from distributed.comm.addressing import parse_host_port

from siirl_dask.coordinator.transport.liveness import answers
from siirl_dask.worker.scheduler_patience import least_patience

_EVERY = 0.05  # of the patience: pause between two pings
_REFUSALS = 3  # in a row, each after a pause of the same length: nobody listens at the scheduler's port any more
_REFUSES = "its port refuses connections"
_NO_CONNECTION = (OSError, RuntimeError)  # which may pass; the latter once the client has closed its connections
_KNOCK_TIMEOUT = 1.0  # seconds for a connection to be taken or refused


def address_of(client: Client) -> str:
    """Return the address of a client's scheduler."""
    assert client.scheduler is not None  # only a client that is closed has none
    return str(client.scheduler.address)


def describe_loss(address: str, patience: float, reason: str | None) -> str:
    """Return a sentence about a scheduler that has ended, for a ``reason``, or was silent for ``patience`` seconds."""
    if reason is not None:
        return f"the scheduler at {address} has ended: {reason}"
    return (
        f"no sign of life of the scheduler at {address} within {patience:g} s (cluster.peer_timeout, "
        f"{least_patience(address):g} s at least): it has ended, or this machine is cut off from it"
    )


class SchedulerWatch:
    """Pings the scheduler from the client's event loop, until ``stop`` or until it is gone or silent for too long."""

    def __init__(
        self, client: Client, patience: float, ping: str | None, on_end: Callable[[str, str | None], None]
    ) -> None:
        """``patience`` is in seconds, ``ping`` the name of a handler on the scheduler; None: it has none of the run's.

        ``on_end`` is called once, on the event loop, with the scheduler's address and what shows that its process has
        ended; None if it is only silent.
        """
        self._client = client
        self._patience = patience
        self._ping_name = ping
        self._on_end = on_end
        self._watching: Future[None] | None = None
        self._known = ""
        self._other_answered = False
        self._scheduler: Any = None

    def start(self) -> None:
        """Begin to ping."""
        loop, self._scheduler = self._client.loop, self._client.scheduler
        assert loop is not None  # only an asynchronous client has no loop of its own
        self._watching = asyncio.run_coroutine_threadsafe(self._watch(), loop.asyncio_loop)  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Ping no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        learning = asyncio.create_task(self.answers_as_before())  # one that stands still already never answers
        silence = asyncio.create_task(self._wait_for_silence())
        refusal = asyncio.create_task(self._wait_for_refusal())
        try:
            done, _ = await asyncio.wait([silence, refusal], return_when=asyncio.FIRST_COMPLETED)
            self._on_end(self._scheduler.address, _REFUSES if refusal in done else silence.result())
        finally:
            learning.cancel()
            silence.cancel()
            refusal.cancel()

    async def _wait_for_silence(self) -> str | None:
        """Return once nobody answers, None, or somebody else does: what shows that."""
        while await answers(self._ping, self._patience):
            if self._other_answered:
                return "another one answers at its address"
            await asyncio.sleep(_EVERY * self._patience)
        return None

    async def _wait_for_refusal(self) -> None:
        """Return once connections are refused: unlike silence, no load and no link that is down looks like that."""
        refused = 0
        while refused < _REFUSALS:
            await asyncio.sleep(_EVERY * self._patience)
            connected = self._client.status == "running"
            refused = 0 if connected or not await refuses(self._scheduler.address) else refused + 1

    async def _ping(self) -> bool:
        try:  # None is the answer where the run's plugin is not there
            answer = None if self._ping_name is None else await getattr(self._scheduler, self._ping_name)()
        except _NO_CONNECTION:
            return False
        return answer is True or await self._identify()

    async def answers_as_before(self) -> bool:
        """Return whether the scheduler answers, and is the one that answered first."""
        return await self._identify() and not self._other_answered

    async def _identify(self) -> bool:
        """Return whether a scheduler says which one it is, and note that."""
        try:
            identity = str((await self._scheduler.identity(n_workers=0))["id"])
        except _NO_CONNECTION:
            return False
        self._known = self._known or identity
        self._other_answered = identity != self._known
        return True


async def refuses(address: str) -> bool:
    """Return whether the port of a Dask address refuses connections."""
    try:
        host, port = parse_host_port(address.partition("://")[2])
        async with asyncio.timeout(_KNOCK_TIMEOUT):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # also a TimeoutError; an address without a port
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False
