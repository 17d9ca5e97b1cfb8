"""How long a scheduler may give no sign of life: it may be busy for longer than a worker."""

from __future__ import annotations

import asyncio

import psutil  # type: ignore[import-untyped]  # Dask needs it
from distributed.comm.addressing import get_address_host

from siirl_dask.worker.monitoring.task_progress import TaskProgress

LEAST_OF_LINKS = 15.0
"""Seconds at least, for a scheduler on another host."""
LEAST_ON_HOST = 8.0
"""Seconds at least, for a scheduler on this host: no link can fail."""
# of the driver's patience: the driver, which reports why a run ends, is to notice first
_WORKER_FACTOR = 2.0
_CHECKS = 30  # in that time


def least_patience(scheduler: str) -> float:
    """Return the least patience with a scheduler at this Dask address."""
    host = get_address_host(scheduler)
    interfaces = psutil.net_if_addrs().values()
    own_addresses = set()
    for addresses in interfaces:
        for address in addresses:
            plain, _, _ = address.address.partition("%")
            own_addresses.add(plain)
    return LEAST_ON_HOST if host in own_addresses else LEAST_OF_LINKS


def scheduler_patience(peer_timeout: float, scheduler: str) -> float:
    """Return the seconds without a sign of life after which the scheduler counts as gone."""
    return max(peer_timeout, least_patience(scheduler))


async def no_heartbeats(progress: TaskProgress, peer_timeout: float, scheduler: str) -> str:
    """Return a reason to stop once the scheduler has answered no heartbeat of this worker for too
    long.

    Checks count, not seconds: a worker that was frozen itself has checked nothing meanwhile.
    """
    patience = _WORKER_FACTOR * scheduler_patience(peer_timeout, scheduler)
    last_read_at = progress.read_at
    checks = 0
    while checks < _CHECKS:
        await asyncio.sleep(patience / _CHECKS)
        checks = checks + 1 if progress.read_at == last_read_at else 0
        last_read_at = progress.read_at
    return f"the scheduler at {scheduler} answered no heartbeat for {patience:g} s"
