"""Raises SchedulerLost while a run is prepared: the run has no plugin on the scheduler yet that
would report it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from distributed import Client

from siirl_dask.config import ClusterConfig
from siirl_dask.dask_internals import hang_up
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.recovery.scheduler_watch import SchedulerWatch, address_of, describe_loss
from siirl_dask.errors import SchedulerLost
from siirl_dask.worker.monitoring.scheduler_patience import scheduler_patience

_VERDICT = 2.0  # times the patience: the watch has found out by then
_INTERVAL = 0.05  # seconds between two questions


@contextmanager
def scheduler_guard(client: Client, cluster: ClusterConfig) -> Iterator[None]:
    """Raise SchedulerLost if the scheduler ends, or is silent for too long, inside, also in place
    of other exceptions.

    Calls of Dask's that wait for the scheduler fail at once when it is lost; the client is of no
    use afterwards.
    """
    guard = _Guard(client, cluster)
    try:
        yield
        reason = guard.known_reason()
    except SchedulerLost as error:
        error.may_return = cluster.scheduler_may_return
        raise
    except Exception as error:
        # Dask raises OSErrors, its own, cancellations, and reports them as a worker's answer
        reason = guard.find_out()
        if reason is None:
            raise
        raise _lost(reason, cluster) from error
    finally:
        guard.stop()
    if reason is not None:
        raise _lost(reason, cluster)


def _lost(reason: str, cluster: ClusterConfig) -> SchedulerLost:
    error = SchedulerLost(f"while the run was prepared: {reason}")
    error.may_return = cluster.scheduler_may_return
    return error


class _Guard:
    """Watches the scheduler of a client, from the start until ``stop``."""

    def __init__(self, client: Client, cluster: ClusterConfig) -> None:
        self._client = client
        self._patience = scheduler_patience(cluster.peer_timeout or 0.0, address_of(client))
        self._end: Future[str] = Future()
        self._watch = SchedulerWatch(client, self._patience, None, self._set_reason)
        self._watch.start()

    def known_reason(self) -> str | None:
        """Return what has happened to the scheduler; None if nothing is known."""
        if self._end.done():
            return self._end.result()
        return None

    def find_out(self) -> str | None:
        """Return what has happened to the scheduler; None once it answers."""
        deadline = time.monotonic() + _VERDICT * self._patience
        while not self._end.done() and time.monotonic() < deadline:
            try:
                if complete(self._client, self._watch.is_the_first, timeout=self._patience):
                    break
            except TimeoutError:
                continue
            time.sleep(_INTERVAL)
        return self.known_reason()

    def stop(self) -> None:
        self._watch.stop()

    def _set_reason(self, address: str, reason: str | None) -> None:
        self._end.set_result(describe_loss(address, self._patience, reason))
        self._disconnecting = asyncio.create_task(hang_up(self._client))
