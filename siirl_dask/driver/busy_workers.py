"""Says where workers are: those that a run waits for, and those that a stopped run leaves busy."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

from distributed import Client

from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.task_progress import Reading
from siirl_dask.worker.tasks import describe_position

logger = logging.getLogger("siirl_dask.driver")
_ANSWER_TIMEOUT = 2.0  # seconds for a worker's event loop to answer
_TIMEOUT = 10.0  # seconds for all of them
_NAMED = 8  # workers that an error names


def where_they_are(busy: Mapping[str, Reading], writing: Sequence[tuple[str, str]]) -> str:
    """Return where the workers in a task are, those that wait for others only where all do.

    ``writing`` has workers that still write their part of a checkpoint, and its URL.
    """
    shown = {worker: reading for worker, reading in busy.items() if not reading.waits} or busy
    named = [f"worker {worker!r} is in {at.place or 'no task of the run'}" for worker, at in shown.items()]
    named += [f"worker {worker!r} still writes its part of {url}" for worker, url in writing]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    waiting = ", the others wait for it" if len(shown) < len(busy) else ""
    return "; ".join(named[:_NAMED]) + more + waiting if named else "no worker is in a task of the run"


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
