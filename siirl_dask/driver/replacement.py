"""Finds workers for a run that has lost some: those that are left keep their ranks, others take the free ones."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Client

from siirl_dask.config import Config
from siirl_dask.driver.arrivals import wait_for_workers
from siirl_dask.driver.processes import members
from siirl_dask.observe import Progress
from siirl_dask.worker.data_plane import DataSettings

logger = logging.getLogger("siirl_dask.driver")
_STOP_TIMEOUT = 1.0  # seconds for a worker that answers nothing to stop by itself; then its nanny kills it
_CALL_TIMEOUT = 30.0  # seconds for the scheduler to remove it


def find_workers(client: Client, config: Config, before: Mapping[str, str], progress: Progress) -> dict[str, str]:
    """Return {name: address} of the workers of the next try, in rank order; ``before`` are those of the last one.

    A worker that answers nothing is given up: where a nanny has started it, that starts another. RunError if there are
    too few after ``cluster.start_timeout``, ConfigError for one that does not fit to the others.
    """
    _give_up_silent(client, list(before.values()), DataSettings.of(config, before.values()).peer_timeout)
    wait_for_workers(client, config.cluster, progress)
    return members(client, config.cluster.workers, before)


def _give_up_silent(client: Client, addresses: Sequence[str], patience: float) -> None:
    """Remove each worker that answers nothing for ``patience`` seconds: nobody could go on with it, nor beside it."""
    present = client.scheduler_info(n_workers=-1)["workers"]
    there = [address for address in addresses if address in present]
    answered: list[bool] = client.sync(_answer, client, there, patience)
    silent = [address for address, alive in zip(there, answered, strict=True) if not alive]
    if not silent:
        return
    logger.warning("given up, since they answer nothing for %g s: workers at %s", patience, ", ".join(silent))
    scheduler: Any = client.scheduler
    client.sync(
        scheduler.restart_workers,
        workers=silent,
        timeout=_STOP_TIMEOUT,
        wait_for_workers=False,
        on_error="return",
        stimulus_id=f"siirl-dask-give-up-{time.time()}",
        callback_timeout=_CALL_TIMEOUT,
    )


async def _answer(client: Client, addresses: Sequence[str], patience: float) -> list[bool]:
    async def answers(address: str) -> bool:
        try:
            await asyncio.wait_for(client.run(time.time, workers=[address]), patience)
        except Exception:  # a worker that is just leaving may break the connection in any way
            return False
        return True

    return await asyncio.gather(*map(answers, addresses))
