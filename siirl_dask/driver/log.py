"""Logs a run from the driver's process: metrics, progress, the summary, the plot."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from siirl_storage import join

from siirl_dask.config import Config
from siirl_dask.config.file.coerce import plain
from siirl_dask.driver.checks.prompts import check_prompts
from siirl_dask.driver.failure_text import failure_text, run_failure_of
from siirl_dask.driver.iterations import CompletedIteration
from siirl_dask.driver.recovery.resume import ResumePoint
from siirl_dask.driver.run_page import RunPage
from siirl_dask.errors import ConfigError, SiirlError, did_you_mean
from siirl_dask.observe import (
    MEASURED,
    STEP_SECONDS,
    Accuracy,
    BytesPerStep,
    Drift,
    MetricsLog,
    Progress,
    Record,
    Restart,
    RunFailure,
    Slowest,
    Status,
    Summary,
    announce,
    read_metrics,
    values,
    write_summary,
)
from siirl_dask.observe.backends import TrackedRun, Tracker, identify
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt import Attempt
from siirl_dask.runs.trace import slowest_of
from siirl_dask.views.charts.run_plot import plot_run
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.driver")


@dataclass(slots=True)
class RunLog:
    """Writes and shows a run: ``begin``, then ``record`` each iteration, then ``end``. Earlier
    steps count as well.
    """

    config: Config
    attempt: Attempt
    """This start of the run: once another one has taken over, nothing more is written."""
    progress: Progress
    resume: ResumePoint = field(default_factory=ResumePoint)
    command: str | None = None
    """Command that starts the run again as the user did, where it is known."""
    drift: Drift = field(default_factory=Drift)
    steps: int = field(init=False)
    """Steps trained, those before the resumption included."""
    samples: float = 0.0
    """Responses trained on."""
    peer_bytes: float = 0.0
    """Bytes from worker to worker."""
    scheduler_bytes: int | None = None
    """Bytes through scheduler and client since the resumption; None where they cannot be
    counted."""
    accuracy: Accuracy = field(default_factory=Accuracy)
    restarts: Sequence[Restart] = ()
    """Failures after which the run went on by itself, and changes of the number of workers."""
    workers: int = field(init=False)
    """Workers that train, or did so last."""
    page: RunPage = field(default_factory=RunPage)
    """The run's page on the dashboard."""
    on_record: Callable[[Record], None] = lambda record: None
    """Called with each record, once it is written."""
    _started: float | None = None
    """Time at which the logs were opened last."""
    _seconds_before: float = 0.0
    """Seconds that the steps before the resumption took."""
    _latest: dict[str, float] = field(default_factory=dict)
    """Metrics of the newest step and of the validation after it, named as ``train/loss``."""
    _of_checkpoints: dict[int, dict[str, float]] = field(default_factory=dict)
    """The same of each step whose checkpoint is being written."""
    _has_best: bool = False
    """True once a record had the metric of ``checkpoint.keep_best``; a step without rows has no
    metrics."""
    _metrics: MetricsLog | None = None
    _tracker: Tracker = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self.resume.done
        self.workers = self.config.cluster.workers
        observe = self.config.observe
        warn = self.progress.note if observe.progress else logger.warning
        self._tracker = Tracker(observe.backends, warn)

    def resume_at(self, resume: ResumePoint) -> None:
        """Set where the run begins, and show it to the user."""
        self.resume = resume
        if not self.begun:
            self.steps = resume.done
        if resume.note:
            self.progress.note(resume.note)

    @property
    def begun(self) -> bool:
        """Whether this start has opened its logs: files of an earlier one that no longer count
        are removed then.
        """
        return self._started is not None

    def begin(self, dashboard: str) -> None:
        """Open the logs. Lines of steps that are done again are dropped, and those of the other
        steps counted.

        A run that is launched again begins again.
        """
        url = self.config.run.url
        last = self.resume.last
        self.steps = self.resume.done
        self.samples = 0.0
        self.peer_bytes = 0.0
        self.accuracy = Accuracy()
        self._seconds_before = 0.0
        self._latest = {}
        self._of_checkpoints = {}
        self._has_best = False
        keep_until: int | None = None
        repeat_from: int | None = None
        if self.resume.exists:
            keep_until = -1
            repeat_from = 0
            if last:
                keep_until = last
                repeat_from = last + 1
        self._metrics = MetricsLog(url, keep_until, self.attempt.number)
        self._begin_tracking(repeat_from)
        if last:
            for record in read_metrics(url):
                self._seconds_before += record["seconds"]
                self._count(record)
        self.drift.begin()
        self._started = time.monotonic()
        self.progress.start(dashboard, url, self.resume.done)

    def record(self, completed: CompletedIteration) -> None:
        """Log a completed iteration. Fenced if another start has taken the run over."""
        phase = completed.iteration.phase.counts_as
        step = completed.iteration.step
        if phase is Phase.CHECKPOINT:
            self._of_checkpoints[step] = self._latest
        if phase not in MEASURED:
            return
        self.attempt.check()
        if phase is Phase.TRAIN:
            self.steps += 1
        record = self.resume.recorded.get((phase, step))
        if record is None:
            record = self._measure(completed)
            self._count(record)
            assert self._metrics is not None
            self._metrics.write(record)
            self._tracker.write(record)
        self.page.write(record)
        self.on_record(record)
        self._set_latest(record)
        if phase is not Phase.TRAIN:
            self.progress.validation(step, record["metrics"], phase)
            return
        self.progress.step(record)
        if completed.iteration.phase is Phase.TRAIN:  # no replay, whose metrics were noted before
            for text in self.drift.note(record):
                self.progress.note(f"drift      {text}")

    def _measure(self, completed: CompletedIteration) -> Record:
        """Return the record of an iteration; that of a replay has the metrics that its stage had
        as well.
        """
        iteration = completed.iteration
        metrics = completed.metrics
        if iteration.phase is Phase.REPLAY:
            metrics = self.resume.metrics_before(iteration) | metrics
        else:
            check_prompts(completed, self.config.data.max_prompt_length)
        named = values(metrics)
        if iteration.phase is Phase.TRAIN:
            _add_speeds(named, completed.seconds)
        return Record(
            step=iteration.step,
            phase=iteration.phase.counts_as,
            seconds=completed.seconds,
            metrics=named,
        )

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return, once, metrics of a checkpoint's step and of the validation after it, named as
        ``train/loss``.
        """
        return self._of_checkpoints.pop(step)

    def announce(self, error: SiirlError) -> None:
        """Print a failure now; ``end`` may follow only after seconds."""
        self.progress.close()
        announce(error)

    def fail(self, error: BaseException) -> None:
        """End a run that has failed: print the error, write the summary, and print how to go on."""
        if self.begun and isinstance(error, SiirlError):
            self.announce(error)
        try:
            message = redacted(f"{type(error).__name__}: {error}")
            self.end(Status.FAILED, message, run_failure_of(error, self.command))
        except Exception as broken:
            # each store has errors of its own; what ended the run must be seen
            text = redacted(f"  the summary is not written: {type(broken).__name__}: {broken}")
            print(text, file=sys.stderr, flush=True)
        if self.begun and isinstance(error, SiirlError):
            for line in failure_text(self.config, error, self.steps, self.command):
                print(f"  {line}", file=sys.stderr, flush=True)

    def end(self, status: Status, error: str | None, failure: RunFailure | None = None) -> Summary:
        """Close the logs; write summary and plot, unless the run never began or another start has
        taken it over.

        Fenced if a run that is complete has its folder no more.
        """
        self.progress.close()
        seconds = self._seconds_before
        if self._started:
            seconds += time.monotonic() - self._started
        steps_here = self.steps - self.resume.done
        through_scheduler = None
        if self.scheduler_bytes and steps_here:
            through_scheduler = self.scheduler_bytes / steps_here
        speed = None
        if self.steps and seconds:
            speed = self.samples / seconds
        between_peers = None
        if self.steps:
            between_peers = self.peer_bytes * (1 / self.steps)
        restarts = [replace(restart, cause=redacted(restart.cause)) for restart in self.restarts]
        summary = Summary(
            run_id=self.config.run.name,
            status=status,
            error=error,
            failure=failure,
            steps=self.steps,
            workers=self.workers,
            seconds=seconds,
            samples_per_second=speed,
            validation=self.accuracy,
            bytes_per_step=BytesPerStep(
                peers=between_peers, scheduler_and_client=through_scheduler
            ),
            restarts=tuple(restarts),
            slowest=self._slowest(),
            warnings=tuple(self.drift.said),
        )
        if status is Status.COMPLETE:
            self.attempt.check()
        if self._started and self.attempt.holds():
            run = self.config.run
            write_summary(run.url, summary)
            if self.steps and self.config.observe.plot:
                plot_run(run.url, join(run.url, "plot.svg"), run.name)
            self._tracker.end(status)
        return summary

    def _begin_tracking(self, repeat_from: int | None) -> None:
        """Open the run in the backends of metrics and overwrite its steps from ``repeat_from``
        on, if that is set.
        """
        run = self.config.run
        observe = self.config.observe
        if not observe.backends:
            return
        is_new = True
        if self.resume.exists or self.begun:
            is_new = False
        identity = identify(run.url, new=is_new)
        earlier: list[Record] = []
        if identity.note is not None:
            self.progress.note(identity.note)
            if self.resume.last:
                earlier = read_metrics(run.url)
        tracked = TrackedRun(
            id=identity.id,
            name=run.name,
            url=run.url,
            project=observe.project,
            config=redacted(plain(self.config)),
        )
        self._tracker.begin(tracked, repeat_from, earlier)

    def _slowest(self) -> Slowest | None:
        """Return what took longest in the last steps; None where nothing is recorded, or another
        start has the run.
        """
        if not self._started or not self.steps or not self.config.observe.trace:
            return None
        if not self.attempt.holds():
            return None
        return slowest_of(self.config.run.url)

    def _count(self, record: Record) -> None:
        """Add a record to the totals of the summary."""
        metrics = record["metrics"]
        if self.config.checkpoint.keep_best in [f"{record['phase']}/{name}" for name in metrics]:
            self._has_best = True
        accuracy = metrics.get("reward/mean")
        match record["phase"]:
            case Phase.TRAIN:
                self.samples += metrics.get("samples") or 0.0
                self.peer_bytes += metrics.get("bytes/peers") or 0.0
            case Phase.TEST:
                self.accuracy = replace(self.accuracy, test=accuracy)
            case Phase.VALIDATION:
                self.accuracy = replace(self.accuracy, last=accuracy)
                if record["step"] == 0:
                    self.accuracy = replace(self.accuracy, first=accuracy)

    def _set_latest(self, record: Record) -> None:
        """Store the metrics for this step's checkpoint.

        ConfigError when the phase never had the metric of ``checkpoint.keep_best``.
        """
        phase = record["phase"]
        named = {f"{phase}/{name}": value for name, value in record["metrics"].items()}
        best = self.config.checkpoint.keep_best
        if best is not None and best.startswith(f"{phase}/") and not self._has_best:
            near = did_you_mean(best, named)
            raise ConfigError(
                f"checkpoint.keep_best={best!r}: {phase} has no such metric (there are: "
                f"{list(named)}){near}"
            )
        known = {name: value for name, value in named.items() if value is not None}
        self._latest = known if phase is Phase.TRAIN else self._latest | known


def _add_speeds(metrics: dict[str, float | None], seconds: float) -> None:
    """Add samples and tokens a second to a step's metrics.

    The time is what the workers took; without that metric, the ``seconds`` between the reports of
    two steps, which may arrive together.
    """
    own = metrics.get(STEP_SECONDS)
    if own:
        seconds = own
    for name in ("samples", "tokens"):
        count = metrics.get(name)
        if count is not None:
            metrics[f"{name}_per_second"] = count / seconds
