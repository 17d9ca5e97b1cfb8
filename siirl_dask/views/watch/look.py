"""Looks at a run again and again: at its metrics, its summary and its signs of life, and at one
part of its tables.

The run goes on while its newest start gives signs of life, whatever its files say: an earlier start
may have left a summary. Clocks are not compared: what counts is whether the sign changes while this
process watches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from siirl_storage import StorageError

from siirl_dask.errors import ConfigError, DataError
from siirl_dask.observe import Pace, Record, Slowest, Summary
from siirl_dask.planner import Phase
from siirl_dask.runs.attempt import RunStart, newest_start
from siirl_dask.runs.preview import preview_samples
from siirl_dask.runs.reader import open_run
from siirl_dask.runs.trace import (
    RECENT_BYTES,
    RECENT_PARTS,
    RECENT_STEPS,
    Trace,
    read_newest,
    slowest_in,
)
from siirl_dask.views.charts.headlines import SECONDS
from siirl_dask.views.charts.series import series_of
from siirl_dask.views.watch.metrics_tail import MetricsTail
from siirl_dask.wording import redacted

_SAMPLES = 3
_PAUSE = 10.0  # seconds between two looks at tables
_BACK = 3  # steps: the newest one's rows may not be written yet
_RECENT = 20  # steps from which the time left is estimated


class Life(Enum):
    """Whether a run goes on."""

    UNDER_WAY = auto()
    UNKNOWN = auto()
    """It has no summary, and nobody has watched for long enough to tell."""
    ENDED = auto()
    """It has ended, and says how."""
    GONE = auto()
    """Its process is gone, or has given no sign of life for ``run.lease``, and has not said how
    it ended."""

    @property
    def is_over(self) -> bool:
        return self in (Life.ENDED, Life.GONE)


@dataclass(frozen=True, slots=True)
class Look:
    """A run at one moment."""

    url: str
    name: str
    total: int | None
    """Steps that the run is to train; None where its configuration cannot be read."""
    life: Life = Life.UNKNOWN
    records: Sequence[Record] = ()
    has_gap: bool = False
    """True if records between the first and the newest ones were not read."""
    summary: Summary | None = None
    start: RunStart | None = None
    seconds_left: float | None = None
    slowest: Slowest | None = None
    traced_steps: Sequence[int] = ()
    """Steps that ``slowest`` is of, ascending."""
    samples: Sequence[Mapping[str, Any]] = ()
    samples_step: int = 0
    trouble: str = ""
    """Why the last look failed; what is here is older then."""

    @property
    def done(self) -> int:
        """Steps trained."""
        return max(
            (record["step"] for record in self.records if record["phase"] == Phase.TRAIN), default=0
        )


class Watcher:
    """Looks at the run at ``url``. ConfigError if there is none."""

    def __init__(self, url: str, *, tables: bool = True) -> None:
        """With ``tables`` it looks for the slowest node and for samples as well."""
        self._run = open_run(url)
        self._reads_tables = tables
        self._tail = MetricsTail(url)
        try:
            config = self._run.config
            self._look = Look(url, config.run.name, config.run.steps)
        except ConfigError:  # another version's: its metrics can be read
            self._look = Look(url, url.rstrip("/").rpartition("/")[2], None)
        self._pace: Pace | None = None
        self._beat: tuple[int, bytes] = (0, b"")
        self._beat_at = self._tables_at = float("-inf")
        self._traced: Trace | None = None

    def look(self, now: float) -> Look:
        """Return the run as it is ``now``, by a monotonic clock; where that fails, as it was, with
        the reason.

        DataError for a line of the metrics that is no record.
        """
        try:
            self._tail.look()
            start = newest_start(self._look.url)
            look = replace(
                self._look,
                records=self._tail.records,
                has_gap=self._tail.has_gap,
                summary=self._summary(),
                start=start,
                trouble="",
            )
            look = replace(
                look, life=self._life(look, now), seconds_left=self._seconds_left(look, now)
            )
            due = now - self._tables_at >= _PAUSE
            if self._reads_tables and (due or look.life.is_over):
                look = self._with_tables(look)
                self._tables_at = now
            self._look = look
        except (StorageError, OSError, ConfigError) as error:
            trouble = redacted(f"it cannot be read just now: {type(error).__name__}: {error}")
            self._look = replace(self._look, trouble=trouble)
        return self._look

    def _with_tables(self, look: Look) -> Look:
        """Return the look with the slowest node of the newest steps, and samples of the newest step
        that has them.
        """
        try:
            look = self._with_slowest(look)
            for step in range(look.done, max(0, look.done - _BACK), -1):
                if step == look.samples_step:
                    break
                samples = preview_samples(look.url, step, _SAMPLES)
                if samples:
                    return replace(look, samples=samples, samples_step=step)
        except DataError as error:  # a damaged part: what is known of earlier steps stays
            return replace(look, trouble=str(error))
        return look

    def _with_slowest(self, look: Look) -> Look:
        """Return the look with what took longest in the newest steps; no others are listed."""
        steps = range(max(1, look.done - RECENT_STEPS + 1), look.done + 1)
        known = None
        if self._traced is not None:
            known = self._traced.parts
        trace = read_newest(
            look.url,
            steps,
            most_bytes=RECENT_BYTES,
            most_parts=RECENT_PARTS,
            known=known,
        )
        if trace is None:  # as it was
            return look
        self._traced = trace
        slowest = slowest_in(trace)
        if slowest is None:
            return look
        return replace(look, slowest=slowest, traced_steps=trace.steps)

    def _summary(self) -> Summary | None:
        try:
            return self._run.summary
        except DataError:
            return None

    def _life(self, look: Look, now: float) -> Life:
        start = look.start
        if start is None or start.is_over:
            if look.summary:
                return Life.ENDED
            if start is None:
                return Life.UNKNOWN
            return Life.GONE
        if start.owner.is_there():
            return Life.UNDER_WAY
        beat = (start.number, start.beat)
        known = self._beat[0] > 0
        if beat != self._beat:
            self._beat = beat
            self._beat_at = now
            if known:
                return Life.UNDER_WAY
        elif now - self._beat_at > start.owner.lease:
            if look.summary:
                return Life.ENDED
            return Life.GONE
        if known:
            return self._look.life
        return Life.UNKNOWN

    def _seconds_left(self, look: Look, now: float) -> float | None:
        """Return the seconds until the last step, without validations: at the pace at which steps
        came while this watched, or else at that of the newest records.
        """
        if look.total is None or look.done >= look.total:
            return None
        if self._pace is None:
            self._pace = Pace(look.done, now)
        elif look.done != self._look.done:
            self._pace.mark(look.done, now)
        seen = self._pace.seconds_left(look.total, now)
        if seen is not None:
            return seen
        recent = [seconds for _, seconds in series_of(look.records, Phase.TRAIN, SECONDS)][
            -_RECENT:
        ]
        if recent:
            return sum(recent) / len(recent) * (look.total - look.done)
        return None
