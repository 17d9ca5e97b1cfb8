"""Launches a run, and again after each failure that may pass, until it is complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from distributed import Client

from siirl_dask.config import Dtype
from siirl_dask.driver.caller import listen, topic_of
from siirl_dask.driver.checks.preflight import check
from siirl_dask.driver.clusters.cluster import connect, reconnect
from siirl_dask.driver.clusters.processes import hosts_of, workers_needed
from siirl_dask.driver.driver import Driver
from siirl_dask.driver.iterations import CompletedIteration, iterations
from siirl_dask.driver.launch import Job, Launch, plan_run, prepare_launch, with_decided_type
from siirl_dask.driver.log import RunLog
from siirl_dask.driver.phases import Phases, worker_names
from siirl_dask.driver.recovery.elastic import ElasticWorkers
from siirl_dask.driver.recovery.preemption import Preempted, Preemption
from siirl_dask.driver.recovery.replacement import FixedWorkers
from siirl_dask.driver.recovery.restarts import Restarts
from siirl_dask.driver.recovery.resume import ResumePoint
from siirl_dask.driver.recovery.scheduler_guard import scheduler_guard
from siirl_dask.driver.recovery.worker_group import WorkerGroup, WorkerGroups
from siirl_dask.errors import SchedulerLost, SiirlError
from siirl_dask.estimates.speeds import note_on_float32
from siirl_dask.observe import Progress, Status
from siirl_dask.planner import Phase


def launch_until_done(job: Job, log: RunLog) -> None:
    """Launch the run until it is complete, or until a failure ends it: see ``Restarts``."""
    with ExitStack() as connection:
        loop = _LaunchLoop(job, log, connection)
        try:
            loop.launch_until_complete()
            log.page.end(Status.COMPLETE)
        except KeyboardInterrupt:
            log.page.end(Status.INTERRUPTED, "stopped by the user", log.command)
            raise
        except Exception as error:
            log.page.end(Status.FAILED, str(error), log.command)
            raise
        finally:
            loop.leave_cluster()


class _LaunchLoop:
    """One start's launches of a run: its client, its workers, and the launch before."""

    def __init__(self, job: Job, log: RunLog, connection: ExitStack) -> None:
        """Connect to the cluster; ``connection`` holds what is open of it."""
        self._job = job
        self._log = log
        self._connection = connection
        self._cluster = job.config.cluster
        self._stop = job.caller.stop
        self._restarts = Restarts(
            job.config.run.max_restarts,
            log.progress.note,
            log.announce,
            elastic=self._cluster.elastic,
        )
        log.restarts = self._restarts.done
        self._client = connection.enter_context(
            connect(job.config, log.progress, security=job.caller.security, check=self._stop.check)
        )
        self._groups: WorkerGroups | None = None
        self._group: WorkerGroup | None = None
        self._driver: Driver | None = None
        """The driver of the latest launch, whose workers may still have the roles that it built."""

    def launch_until_complete(self) -> None:
        """Return when the run is complete. Raises the failure that ends it."""
        failure: SiirlError | None = None
        while True:
            self._check_stop()
            try:
                if isinstance(failure, SchedulerLost):
                    self._reconnect()
                previous = self._driver
                launch = self._prepare(failure, previous)
                self._driver = launch.driver
                self._drive(launch, previous)
                return
            except SiirlError as error:
                self._check_goes_on(error)
                failure = error
            self._log.progress.close()
            self._restarts.pause(failure)
            self._log.attempt.begin_again()

    def leave_cluster(self) -> None:
        """Take the run off a cluster that stays; one that was started for it ends with it."""
        if self._driver is None:
            return
        if self._cluster.exists:
            self._driver.close()
        else:
            self._driver.abandon()

    def _check_stop(self) -> None:
        """Raise Preempted where the caller has cancelled the run before a launch has begun."""
        self._stop.check()
        if self._stop.after_step.is_set() and self._log.steps < self._job.config.run.steps:
            raise Preempted

    def _check_goes_on(self, error: SiirlError) -> None:
        """Raise the failure that ends the run, unless it is launched again after ``error``."""
        if not self._stop.after_step.is_set() and self._is_relaunched(error):
            return
        cause = self._restarts.cause(error)
        if cause is error:
            raise error
        raise cause from error

    def _is_relaunched(self, error: SiirlError) -> bool:
        """Return whether the run is launched again after a failure; the first call shows that to
        the user.
        """
        return self._restarts.after(error, self._log.steps)

    def _reconnect(self) -> None:
        """Connect to the scheduler that takes the place of one that is lost."""
        if self._driver is not None:
            self._driver.abandon()
        self._driver = None  # what it had built has gone with its workers
        self._connection.close()
        self._client = self._connection.enter_context(
            reconnect(
                self._job.config,
                self._log.progress,
                security=self._job.caller.security,
                check=self._stop.check,
            )
        )

    def _prepare(self, failure: SiirlError | None, previous: Driver | None) -> Launch:
        """Find the workers of the next launch, and prepare it. Raises SchedulerLost where the
        scheduler goes meanwhile.
        """
        client = self._client
        with scheduler_guard(client, self._cluster):
            if self._cluster.exists:
                listen(client, topic_of(self._log.attempt.owner), self._stop)
            if self._groups is None:
                self._job = _with_workers_dtype(self._job, self._log, client)
                self._groups = _worker_groups(self._job, self._log.progress, self._check_stop)
            plugin = None
            if previous is not None:
                plugin = previous.plugin
            self._group = self._groups.find(client, self._group, failure, plugin)
            with workers_needed(client, self._group.members):
                return prepare_launch(
                    self._job,
                    self._log,
                    client,
                    group=self._group,
                    groups=self._groups,
                    previous=previous,
                )

    def _drive(self, launch: Launch, previous: Driver | None) -> None:
        """Run every iteration. Preempted where the run ends before its last step on request."""
        log = self._log
        driver = launch.driver
        log.workers = len(launch.group.members)
        saves = bool(log.config.checkpoint.every)
        grace = 0.0
        if saves:
            grace = log.config.run.grace
        stop = self._stop.after_step
        with driver.session(self._cluster, self._is_relaunched, previous):
            self._begin(launch, previous)
            bytes_before = driver.traffic()
            with Preemption(grace, log.progress.note, stop, saves=saves) as preemption:
                last_step_at = self._run_iterations(launch, preemption)
            bytes_after = driver.traffic()
            if bytes_before is None or bytes_after is None:
                log.scheduler_bytes = None
            else:
                log.scheduler_bytes = bytes_after - bytes_before
            if not preemption.requested:
                launch.groups.check_change(log.steps, last_step_at)
        if preemption.requested and log.steps < log.config.run.steps:
            if log.steps and saves:
                raise Preempted(f", the checkpoint of step {log.steps} as well")
            raise Preempted

    def _begin(self, launch: Launch, previous: Driver | None) -> None:
        """Write what belongs to the run's start, and show it to the user: all roles are built."""
        log = self._log
        driver = launch.driver
        members = launch.group.members
        launch.prepare_folder()
        done = log.resume.done
        dashboard = log.page.begin(
            self._client, log.config, log.attempt.url, driver.plugin, members=members, done=done
        )
        log.begin(dashboard)
        for note in launch.notes:
            log.progress.note(note)
        reused = sum(1 for roles in driver.reused_roles.values() if roles)
        self._restarts.resumed(done, len(members), reused)
        if log.config.model.dtype is Dtype.float32 and previous is None:
            for accelerator in sorted(driver.accelerators):
                log.progress.note(note_on_float32(accelerator))

    def _run_iterations(self, launch: Launch, preemption: Preemption) -> float:
        """Run the iterations, and log or commit each as it is done. Returns the time at which the
        last one that is no checkpoint was done.
        """
        log = self._log
        resume = log.resume
        last_step_at = time.monotonic()
        planned = iterations(
            log.config, list(launch.phases), resume.done, resume.stages, resume.recorded
        )
        planned = preemption.cut(launch.groups.until_change(planned))
        for event in launch.driver.run(planned):
            if not isinstance(event, CompletedIteration):
                launch.commits.commit(event)
                continue
            log.record(event)
            if event.iteration.phase is not Phase.CHECKPOINT:
                last_step_at = time.monotonic()
        return last_step_at


def _with_workers_dtype(job: Job, log: RunLog, client: Client) -> Job:
    """Return the job with the number type that its workers decide."""
    if job.open_types is None:
        return job
    number_type = job.open_types.on_workers(client)
    open_types = replace(job.open_types, expected=number_type)
    if number_type.dtype is job.open_types.expected.dtype:
        return replace(job, open_types=open_types)
    config, dag, validation = with_decided_type(job.open_types, number_type.dtype)
    phases = plan_run(config, dag, validation, workers=worker_names(config), resume=log.resume)
    checked = check(config, phases)
    log.config = config
    return replace(
        job,
        config=config,
        dag=dag,
        validation=validation,
        checked=checked,
        open_types=open_types,
    )


def _worker_groups(job: Job, progress: Progress, check_stop: Callable[[], None]) -> WorkerGroups:
    """Return what finds the workers of each launch. ``check_stop`` is called while it waits for
    them, and may raise.
    """
    config = job.config
    if not config.cluster.elastic:
        return FixedWorkers(config, progress, check_stop)

    def plan(group: WorkerGroup) -> Phases:
        phases = plan_run(
            group.config,
            job.dag,
            job.validation,
            workers=list(group.members),
            resume=ResumePoint(),
            hosts=hosts_of(group.members),
        )
        check(group.config, phases)
        return phases

    return ElasticWorkers(config, plan, job.checked.reads, progress, check_stop)
