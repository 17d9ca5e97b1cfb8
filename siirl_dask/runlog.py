"""What the driver's process writes and shows of a run: metrics, progress, the summary, the plot."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from siirl_storage import join

from siirl_dask.config import Config
from siirl_dask.driver import Done
from siirl_dask.observe import (
    Accuracy,
    BytesPerStep,
    MetricsLog,
    Phase,
    Progress,
    Record,
    Status,
    Summary,
    TensorBoardLog,
    plot_run,
    values,
    write_summary,
)


@dataclass(slots=True)
class RunLog:
    """``begin``, then ``record`` each turn, then ``end``, whatever happened."""

    config: Config
    steps: int = 0
    samples: float = 0.0
    peer_bytes: float = 0.0
    scheduler_bytes: int | None = None
    accuracy: Accuracy = field(default_factory=Accuracy)
    progress: Progress = field(init=False)
    _started: float | None = None
    _metrics: MetricsLog | None = None
    _tensorboard: TensorBoardLog | None = None

    def __post_init__(self) -> None:
        self.progress = Progress(self.config.run.steps, enabled=self.config.observe.progress)

    def begin(self, dashboard: str) -> None:
        self._metrics = MetricsLog(self.config.run.url)
        self._tensorboard = TensorBoardLog(self.config.run.url) if self.config.observe.tensorboard else None
        self._started = time.monotonic()
        self.progress.start(dashboard, self.config.run.url)

    def record(self, done: Done) -> None:
        metrics = values(done.metrics)
        phase: Phase = done.turn.phase  # type: ignore[assignment]
        if phase == "train":
            self._tally(metrics, done.seconds)
        record = Record(step=done.turn.step, phase=phase, seconds=done.seconds, metrics=metrics)
        assert self._metrics is not None
        self._metrics.write(record)
        if self._tensorboard:
            self._tensorboard.write(record)
        if phase == "train":
            self.progress.step(record)
            return
        accuracy = metrics.get("reward/mean")
        if phase == "test":
            self.accuracy = replace(self.accuracy, test=accuracy)
        else:
            self.accuracy = replace(
                self.accuracy, last=accuracy, **({"first": accuracy} if done.turn.step == 0 else {})
            )
        self.progress.validation(done.turn.step, metrics, phase)

    def end(self, status: Status, error: str | None) -> Summary:
        """Close what is open and write the summary; nothing is written for a run that never began."""
        self.progress.close()
        if self._tensorboard:
            self._tensorboard.close()
        seconds = time.monotonic() - self._started if self._started else 0.0
        per_step = 1 / self.steps if self.steps else None
        summary = Summary(
            run_id=self.config.run.name,
            status=status,
            error=error,
            steps=self.steps,
            workers=self.config.cluster.workers,
            seconds=seconds,
            samples_per_second=self.samples / seconds if self.steps else None,
            validation=self.accuracy,
            bytes_per_step=BytesPerStep(
                peers=self.peer_bytes * per_step if per_step else None,
                scheduler_and_client=self.scheduler_bytes * per_step if self.scheduler_bytes and per_step else None,
            ),
        )
        if self._started:
            write_summary(self.config.run.url, summary)
            if self.steps:
                plot_run(self.config.run.url, join(self.config.run.url, "plot.png"), self.config.run.name)
        return summary

    def _tally(self, metrics: dict[str, float | None], seconds: float) -> None:
        self.steps += 1
        self.samples += metrics.get("samples") or 0.0
        self.peer_bytes += metrics.get("bytes/peers") or 0.0
        for name in ("samples", "tokens"):
            if (count := metrics.get(name)) is not None:
                metrics[f"{name}_per_second"] = count / seconds
