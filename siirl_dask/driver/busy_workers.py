"""Names the workers of an existing cluster that a stopped run leaves inside a task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from distributed import Client

from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.tasks import describe_position

logger = logging.getLogger("siirl_dask.driver")
_ANSWER_TIMEOUT = 2.0  # seconds for a worker's event loop to answer
_TIMEOUT = 10.0  # seconds for all of them


def warn_of_busy_workers(client: Client, spec: RunSpec, busy: Sequence[str]) -> None:
    """Log where each of the members ``busy`` is: it takes no other task until its own returns."""
    if not busy:
        return
    try:
        present = client.scheduler_info(n_workers=-1)["workers"]
        addresses = [address for worker in busy if (address := spec.members[worker]) in present]
        positions = client.sync(_ask_positions, client, spec.plugin, addresses, callback_timeout=_TIMEOUT)
    except OSError:
        return  # the scheduler is gone
    for address, position in zip(addresses, positions, strict=True):
        name = present[address]["name"]
        advice = "it takes no other task until that returns; restart it if it never does"
        logger.warning("worker %r at %s is still inside %s: %s", str(name), address, position, advice)


async def _ask_positions(client: Client, plugin: str, addresses: Sequence[str]) -> list[str]:
    async def ask(address: str) -> str:
        call = client.run(describe_position, plugin, workers=[address])
        try:
            return str((await asyncio.wait_for(call, _ANSWER_TIMEOUT))[address])
        except Exception:  # a worker whose event loop gets no time may break the connection in any way
            return "a call that keeps it from answering"

    return await asyncio.gather(*map(ask, addresses))
