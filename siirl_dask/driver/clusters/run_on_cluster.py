"""A run's plugins on the scheduler and its workers: installs them, calls them through the
scheduler, removes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from distributed import Client

from siirl_dask.dask_internals import SchedulerRpc
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.driver.recovery.scheduler_watch import SchedulerWatch, address_of, describe_loss
from siirl_dask.errors import SchedulerLost
from siirl_dask.scheduler import Supervisor
from siirl_dask.worker.dag_worker import DAGWorker
from siirl_dask.worker.monitoring.scheduler_patience import scheduler_patience
from siirl_dask.worker.monitoring.task_progress import Reading
from siirl_dask.worker.run_spec import RunSpec
from siirl_dask.worker.tasks import port_of

logger = logging.getLogger("siirl_dask.driver")
_CALL_TIMEOUT = 10.0  # seconds for the scheduler to answer
# seconds for every worker to drop the run's plugin; one that is cut off never does
_LEAVE_TIMEOUT = 3.0

Report = Callable[[dict[str, Any]], None]
"""Handles an event of the run, from any thread."""


class RunOnCluster:
    """The run's plugins: a supervisor on the scheduler, and a DAG worker on each worker.

    Calls to the scheduler raise OSError where it is gone, or too busy to answer in time.
    """

    def __init__(self, client: Client, spec: RunSpec, report: Report) -> None:
        """``report`` is called with each event of a worker or the supervisor, and when the
        scheduler is gone.
        """
        self._client = client
        self._spec = spec
        self._report = report
        self._is_registered = False
        self._is_abandoned = False
        self._patience = scheduler_patience(spec.data.peer_timeout, address_of(client))
        self._watch = SchedulerWatch(
            client, self._patience, f"{spec.plugin}-ping", self._report_no_scheduler
        )

    @property
    def is_reachable(self) -> bool:
        """True from the registration until ``leave``, as long as the scheduler can be reached."""
        if self._is_abandoned:
            return False
        return self._is_registered

    def register(
        self,
        cluster_stays: bool,
        report_interval: float,
        meanwhile: Callable[[], None],
        *,
        elastic: bool = False,
        node_timeout: float = 0.0,
    ) -> list[int]:
        """Install the plugins; return the ports where the workers listen for peers, in rank order.

        ``cluster_stays``: the cluster stays when this process ends. The supervisor reports progress
        every ``report_interval`` seconds, idle workers if the run is ``elastic``, and nodes that
        get nothing done for ``node_timeout`` seconds. ``meanwhile`` is called during the wait for
        the workers, and may raise to end it. SchedulerLost when the scheduler goes away; PeerError
        if another run has just taken a worker that was idle.
        """
        client = self._client
        plugin = self._spec.plugin
        addresses = list(self._spec.members.values())
        supervisor = Supervisor(
            plugin,
            self._spec.topic,
            self._spec.members,
            client.id if cluster_stays else None,
            patience=self._patience,
            report_every=report_interval,
            follows=self._spec.follows,
            elastic=elastic,
            run=self._spec.name,
            node_timeout=node_timeout,
        )
        try:
            client.subscribe_topic(self._spec.topic, lambda event: self._report(event[1]))
            complete(client, lambda: client.register_plugin(supervisor), timeout=self._patience)
            self._is_registered = True
            self._watch.start()
            complete(client, lambda: client.register_plugin(DAGWorker(self._spec)), meanwhile)
            ports = complete(
                client, lambda: client.run(port_of, plugin, workers=addresses), meanwhile
            )
        except OSError as error:
            raise SchedulerLost(
                f"the scheduler went away while the run was put on its workers: {error}"
            ) from error
        return [ports[address] for address in addresses]

    def leave(self) -> None:
        """Remove the plugins. Where this process is cut off from the cluster, the supervisor
        does so by itself.
        """
        self._watch.stop()
        if not self.is_reachable:
            return
        self._is_registered = False
        try:
            self._client.unsubscribe_topic(self._spec.topic)
            self._call("leave", _LEAVE_TIMEOUT)
        except OSError as error:
            logger.warning(
                "what this run built may stay on a worker until that is restarted: %s", error
            )

    def abort(self, reason: str) -> None:
        """Order every worker to stop."""
        try:
            self._call("abort", reason=reason)
        except OSError as error:
            logger.warning("the scheduler did not take the order to stop the workers: %s", error)

    def abandon(self) -> None:
        """Send nothing more to the scheduler: it is gone."""
        self._is_abandoned = True

    def stop_watching(self) -> None:
        """Stop watching the scheduler."""
        self._watch.stop()

    def present(self) -> set[str]:
        """Return the workers of the run that have not left the cluster."""
        try:
            known = self._client.scheduler_info(n_workers=-1)["workers"]
        except OSError:
            return set()
        return {worker for worker, address in self._spec.members.items() if address in known}

    def traffic(self) -> int | None:
        """Return the bytes through the scheduler and the client since ``register``; None where
        nobody counts them.
        """
        try:
            count: int | None = self._call("traffic")
        except OSError:
            # a figure of a table is no reason to end a run; the watch reports a scheduler that is
            # gone
            return None
        return count

    def readings(self) -> dict[str, Reading]:
        """Return where each worker was at its last heartbeat."""
        return {
            worker: Reading(beats, place, waits)
            for worker, (beats, place, waits) in self._call("readings").items()
        }

    def _report_no_scheduler(self, address: str, reason: str | None) -> None:
        self._report(
            {"kind": "no scheduler", "what": describe_loss(address, self._patience, reason)}
        )

    def _call(self, operation: str, timeout: float = _CALL_TIMEOUT, **arguments: Any) -> Any:
        """Call the supervisor on the scheduler."""
        scheduler = SchedulerRpc(self._client)
        handler = f"{self._spec.plugin}-{operation}"
        return self._client.sync(scheduler.call, handler, callback_timeout=timeout, **arguments)
