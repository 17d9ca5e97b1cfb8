"""Says how long a scheduler may give no sign of life: it may be busy for longer than a worker."""

from __future__ import annotations

import asyncio

import psutil  # type: ignore[import-untyped]  # Dask needs it
from distributed.comm.addressing import get_address_host

from siirl_dask.worker.pulse import Pulse

LEAST_OF_LINKS = 15.0
"""Seconds at least, for a scheduler on another host."""
LEAST_ON_HOST = 8.0
"""Seconds at least, for a scheduler on this host: no link can fail."""


_FOR_DRIVER = 2.0  # times the patience that a worker has: the driver, which says why a run ends, is to be the first
_LOOKS = 30  # in that time


def least_patience(scheduler: str) -> float:
    """Return the least patience with a scheduler at this Dask address."""
    host = get_address_host(scheduler)
    own = {address.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses}
    return LEAST_ON_HOST if host in own else LEAST_OF_LINKS


def scheduler_patience(peer_timeout: float, scheduler: str) -> float:
    """Return the seconds without a sign of life after which the scheduler counts as gone."""
    return max(peer_timeout, least_patience(scheduler))


async def no_heartbeats(pulse: Pulse, peer_timeout: float, scheduler: str) -> str:
    """Return, and say so, once the scheduler has answered no heartbeat of this worker for too long.

    Looks count, not seconds: a worker that was frozen itself has looked at nothing meanwhile.
    """
    patience = _FOR_DRIVER * scheduler_patience(peer_timeout, scheduler)
    read_at, silent = pulse.read_at, 0
    while silent < _LOOKS:
        await asyncio.sleep(patience / _LOOKS)
        silent = silent + 1 if read_at == pulse.read_at else 0
        read_at = pulse.read_at
    return f"the scheduler at {scheduler} answered no heartbeat for {patience:g} s"
