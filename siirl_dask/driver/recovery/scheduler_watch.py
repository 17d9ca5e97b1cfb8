"""Detects that the scheduler is gone or that this machine is cut off from it, which Dask's
client notices late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from distributed import Client
from distributed.comm.addressing import parse_host_port

from siirl_dask.coordinator.transport.peers import answers
from siirl_dask.dask_internals import SchedulerRpc, start_on_loop
from siirl_dask.worker.monitoring.scheduler_patience import least_patience

_PAUSE = 0.05  # pause between two pings, as a share of the patience
# in a row, each after a pause of the same length: nobody listens at the scheduler's port any more
_REFUSALS = 3
_REFUSES = "its port refuses connections"
# which may pass; the latter once the client has closed its connections
_NO_CONNECTION = (OSError, RuntimeError)
_CONNECT_TIMEOUT = 1.0  # seconds for a connection to be accepted or refused


def address_of(client: Client) -> str:
    """Return the address of a client's scheduler."""
    return SchedulerRpc(client).address


def describe_loss(address: str, patience: float, reason: str | None) -> str:
    """Return a sentence about a scheduler that has ended, for a ``reason``, or was silent for
    ``patience`` seconds.
    """
    if reason is not None:
        return f"the scheduler at {address} has ended: {reason}"
    return (
        f"no sign of life of the scheduler at {address} within {patience:g} s "
        "(cluster.peer_timeout, "
        f"{least_patience(address):g} s at least): it has ended, or this machine is cut off from it"
    )


class SchedulerWatch:
    """Pings the scheduler from the client's event loop, until ``stop`` or until it is gone or
    silent for too long.
    """

    def __init__(
        self,
        client: Client,
        patience: float,
        ping: str | None,
        on_end: Callable[[str, str | None], None],
    ) -> None:
        """``patience`` is in seconds, ``ping`` the name of a handler of the run on the scheduler;
        None if it has none.

        ``on_end`` is called once, on the event loop, with the scheduler's address and the evidence
        that its process has ended; None if it is only silent.
        """
        self._client = client
        self._patience = patience
        self._ping_name = ping
        self._on_end = on_end
        self._watching: Future[None] | None = None
        self._first_identity = ""
        self._other_answered = False
        self._scheduler: SchedulerRpc

    def start(self) -> None:
        """Begin to ping."""
        self._scheduler = SchedulerRpc(self._client)
        self._watching = start_on_loop(self._client, self._watch())

    def stop(self) -> None:
        """Stop pinging."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        # a scheduler that hangs already never answers
        first_answer = asyncio.create_task(self.is_the_first())
        silence = asyncio.create_task(self._wait_for_silence())
        refusal = asyncio.create_task(self._wait_for_refusal())
        try:
            done, _ = await asyncio.wait([silence, refusal], return_when=asyncio.FIRST_COMPLETED)
            reason = _REFUSES if refusal in done else silence.result()
            self._on_end(self._scheduler.address, reason)
        finally:
            first_answer.cancel()
            silence.cancel()
            refusal.cancel()

    async def _wait_for_silence(self) -> str | None:
        """Return None once nobody answers, or the evidence once another scheduler does."""
        while await answers(self._ping, self._patience):
            if self._other_answered:
                return "another one answers at its address"
            await asyncio.sleep(_PAUSE * self._patience)
        return None

    async def _wait_for_refusal(self) -> None:
        """Return once connections are refused: unlike silence, no load and no link that is down
        looks like that.
        """
        refused = 0
        while refused < _REFUSALS:
            await asyncio.sleep(_PAUSE * self._patience)
            is_connected = self._client.status == "running"
            if not is_connected and await refuses(self._scheduler.address):
                refused += 1
            else:
                refused = 0

    async def _ping(self) -> bool:
        answer: bool | None = None
        try:
            if self._ping_name is not None:
                answer = await self._scheduler.call(self._ping_name)
        except _NO_CONNECTION:
            return False
        if answer is True:
            return True
        return await self._identify()  # the run's plugin is not there

    async def is_the_first(self) -> bool:
        """Return whether the scheduler answers, and is the one that answered first."""
        if not await self._identify():
            return False
        return not self._other_answered

    async def _identify(self) -> bool:
        """Return whether a scheduler answers with its identity, and store that."""
        try:
            identity = str((await self._scheduler.identity(n_workers=0))["id"])
        except _NO_CONNECTION:
            return False
        if not self._first_identity:
            self._first_identity = identity
        self._other_answered = identity != self._first_identity
        return True


async def refuses(address: str) -> bool:
    """Return whether the port of a Dask address refuses connections."""
    try:
        host, port = parse_host_port(address.partition("://")[2])
        async with asyncio.timeout(_CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError):  # also a TimeoutError; an address without a port
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False
