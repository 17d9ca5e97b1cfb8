"""Logs a run from the driver's process: metrics, progress, the summary, the plot."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from siirl_storage import join

from siirl_dask.config import Config
from siirl_dask.config.file.coerce import plain
from siirl_dask.config.secrets import redacted
from siirl_dask.driver.ending import ending, failure_of
from siirl_dask.driver.prompts import check_prompts
from siirl_dask.driver.resume import ResumePoint
from siirl_dask.driver.run_page import RunPage
from siirl_dask.driver.under_way import Done
from siirl_dask.errors import ConfigError, SiirlError, did_you_mean
from siirl_dask.observe import (
    MEASURED,
    Accuracy,
    BytesPerStep,
    Drift,
    Failure,
    MetricsLog,
    Progress,
    Record,
    Restart,
    Slowest,
    Status,
    Summary,
    plot_run,
    read_metrics,
    values,
    write_summary,
)
from siirl_dask.observe.backends import TrackedRun, Tracker, tracked_id
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt import Attempt
from siirl_dask.runs.trace import slowest_of

logger = logging.getLogger("siirl_dask.driver")


@dataclass(slots=True)
class RunLog:
    """Writes and shows a run: ``begin``, then ``record`` each iteration, then ``end``. Earlier steps count as well."""

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
    """Bytes through scheduler and client since the resumption; None where they cannot be counted."""
    accuracy: Accuracy = field(default_factory=Accuracy)
    restarts: Sequence[Restart] = ()
    """Failures after which the run went on by itself, and changes of the number of workers."""
    workers: int = field(init=False)
    """Workers that train, or did so last."""
    page: RunPage = field(default_factory=RunPage)
    """The run's page on the dashboard."""
    _started: float | None = None
    _seconds_before: float = 0.0
    _latest: dict[str, float] = field(default_factory=dict)
    _of_step: dict[int, dict[str, float]] = field(default_factory=dict)
    _had_best: bool = False
    """True once a record had the metric of ``checkpoint.keep_best``; a step without rows has no metrics."""
    _metrics: MetricsLog | None = None
    _tracker: Tracker = field(init=False)

    def __post_init__(self) -> None:
        self.steps, self.workers = self.resume.done, self.config.cluster.workers
        observe = self.config.observe
        self._tracker = Tracker(observe.backends, self.progress.note if observe.progress else logger.warning)

    def resume_at(self, resume: ResumePoint) -> None:
        """Set where the run begins, and say so."""
        self.resume = resume
        if not self.begun:
            self.steps = resume.done
        if resume.note:
            self.progress.note(resume.note)

    @property
    def begun(self) -> bool:
        """Whether this start has come as far as its first step: what an earlier one left is not there any more."""
        return self._started is not None

    def begin(self, dashboard: str) -> None:
        """Open the logs; a resumed run's lines of steps that are done anew are dropped, and the others are counted.

        A run that is tried again begins again.
        """
        url, done, last = self.config.run.url, self.resume.done, self.resume.last
        self.steps, self.samples, self.peer_bytes, self.accuracy = done, 0.0, 0.0, Accuracy()
        self._seconds_before, self._latest, self._of_step, self._had_best = 0.0, {}, {}, False
        until, again_from = (last or -1, last + 1 if last else 0) if self.resume.exists else (None, None)
        self._metrics = MetricsLog(url, until, self.attempt.number)
        self._track(again_from)
        for record in read_metrics(url) if last else ():
            self._seconds_before += record["seconds"]
            self._tally(record)
        self.drift.begin()
        self._started = time.monotonic()
        self.progress.start(dashboard, url, done)

    def record(self, done: Done) -> None:
        """Log a completed iteration. Fenced if another start has taken the run over."""
        phase, step = done.iteration.phase.counts_as, done.iteration.step
        if phase is Phase.CHECKPOINT:
            self._of_step[step] = self._latest
        if phase not in MEASURED:
            return
        self.attempt.check()
        if phase is Phase.TRAIN:
            self.steps += 1
        if (record := self.resume.measured.get((phase, step))) is None:
            record = self._measure(done)
            self._tally(record)
            assert self._metrics is not None
            self._metrics.write(record)
            self._tracker.write(record)
        self.page.write(record)
        self._remember(record)
        if phase is Phase.TRAIN:
            self.progress.step(record)
            for text in self.drift.note(record) if done.iteration.phase is Phase.TRAIN else ():
                self.progress.note(f"drift      {text}")
        else:
            self.progress.validation(step, record["metrics"], phase)

    def _measure(self, done: Done) -> Record:
        """Return the record of an iteration; that of a replay has the metrics that its stage had as well."""
        iteration, metrics = done.iteration, done.metrics
        if iteration.phase is Phase.REPLAY:
            metrics = self.resume.metrics_before(iteration) | metrics
        else:
            check_prompts(done, self.config.data.max_prompt_length)
        named = values(metrics)
        if iteration.phase is Phase.TRAIN:
            _add_speeds(named, done.seconds)
        return Record(step=iteration.step, phase=iteration.phase.counts_as, seconds=done.seconds, metrics=named)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return, once, metrics of a checkpoint's step and of the validation after it, named as ``train/loss``."""
        return self._of_step.pop(step)

    def announce(self, error: SiirlError) -> None:
        """Print a failure now; ``end`` may follow only after seconds."""
        self.progress.close()
        error.announce()

    def fail(self, error: BaseException) -> None:
        """End a run that has failed: print the error, write the summary, and say how to go on."""
        if self.begun and isinstance(error, SiirlError):
            self.announce(error)
        try:
            self.end(Status.FAILED, redacted(f"{type(error).__name__}: {error}"), failure_of(error, self.command))
        except Exception as broken:  # each store has errors of its own; what ended the run must be seen
            text = redacted(f"  the summary is not written: {type(broken).__name__}: {broken}")
            print(text, file=sys.stderr, flush=True)
        if self.begun and isinstance(error, SiirlError):
            for line in ending(self.config, error, self.steps, self.command):
                print(f"  {line}", file=sys.stderr, flush=True)

    def end(self, status: Status, error: str | None, failure: Failure | None = None) -> Summary:
        """Close the logs; write summary and plot, unless the run never began or another start has taken it over.

        Fenced if a run that is complete has its folder no more.
        """
        self.progress.close()
        seconds = self._seconds_before + (time.monotonic() - self._started if self._started else 0.0)
        per_step = 1 / self.steps if self.steps else None
        here = self.steps - self.resume.done
        summary = Summary(
            run_id=self.config.run.name,
            status=status,
            error=error,
            failure=failure,
            steps=self.steps,
            workers=self.workers,
            seconds=seconds,
            samples_per_second=self.samples / seconds if self.steps and seconds else None,
            validation=self.accuracy,
            bytes_per_step=BytesPerStep(
                peers=self.peer_bytes * per_step if per_step else None,
                scheduler_and_client=self.scheduler_bytes / here if self.scheduler_bytes and here else None,
            ),
            restarts=tuple(replace(one, cause=redacted(one.cause)) for one in self.restarts),
            slowest=self._slowest(),
            warnings=tuple(self.drift.said),
        )
        if status is Status.COMPLETE:
            self.attempt.check()
        if self._started and self.attempt.holds():
            write_summary(self.config.run.url, summary)
            if self.steps and self.config.observe.plot:
                plot_run(self.config.run.url, join(self.config.run.url, "plot.png"), self.config.run.name)
            self._tracker.end(status)
        return summary

    def _track(self, again_from: int | None) -> None:
        """Have the backends of metrics open the run, or take the steps from ``again_from`` on once more."""
        run, observe = self.config.run, self.config.observe
        if observe.backends:
            number = tracked_id(run.url, new=not self.resume.exists and not self.begun)
            tracked = TrackedRun(
                id=number, name=run.name, url=run.url, project=observe.project, config=redacted(plain(self.config))
            )
            self._tracker.begin(tracked, again_from)

    def _slowest(self) -> Slowest | None:
        """Return what took longest in the last steps; None where nothing is recorded, or another start has the run."""
        known = self._started and self.steps and self.config.observe.trace and self.attempt.holds()
        return slowest_of(self.config.run.url) if known else None

    def _tally(self, record: Record) -> None:
        step, metrics = record["step"], record["metrics"]
        self._had_best |= self.config.checkpoint.keep_best in [f"{record['phase']}/{name}" for name in metrics]
        accuracy = metrics.get("reward/mean")
        match record["phase"]:
            case Phase.TRAIN:
                self.samples += metrics.get("samples") or 0.0
                self.peer_bytes += metrics.get("bytes/peers") or 0.0
            case Phase.TEST:
                self.accuracy = replace(self.accuracy, test=accuracy)
            case Phase.VALIDATION:
                first = {"first": accuracy} if step == 0 else {}
                self.accuracy = replace(self.accuracy, last=accuracy, **first)

    def _remember(self, record: Record) -> None:
        """Keep the numbers for this step's checkpoint. ConfigError when the phase never had the metric of keep_best."""
        phase = record["phase"]
        named = {f"{phase}/{name}": value for name, value in record["metrics"].items()}
        best = self.config.checkpoint.keep_best or ""
        if best.startswith(f"{phase}/") and not self._had_best:
            near = did_you_mean(best, named)
            raise ConfigError(
                f"checkpoint.keep_best={best!r}: {phase} has no such metric (there are: {[*named]}){near}"
            )
        before = {} if phase is Phase.TRAIN else self._latest
        self._latest = before | {name: value for name, value in named.items() if value is not None}


def _add_speeds(metrics: dict[str, float | None], seconds: float) -> None:
    for name in ("samples", "tokens"):
        if (count := metrics.get(name)) is not None:
            metrics[f"{name}_per_second"] = count / seconds
