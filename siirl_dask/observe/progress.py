"""Shows the progress of a run: a bar on a terminal, a line every few steps in a CI log, or
nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

from rich import progress as bars
from rich.console import Console
from rich.text import Text

from siirl_dask.observe.console import PipeConsole
from siirl_dask.observe.metrics import Record
from siirl_dask.observe.tenths import Tenths
from siirl_dask.observe.waits import arrivals, transfer
from siirl_dask.planner import Phase
from siirl_dask.wording import redacted

_LINES = 20  # lines that a whole run prints without a terminal; a slow one prints more
_SILENCE = 60.0  # seconds after which a step is printed in any case
_PASS_SILENCE = 30.0  # seconds between lines about a pass of which nobody knows how far it is
_START_SILENCE = 10.0  # seconds between lines about a start, and before the first
_MOST = 0.99  # of a step, while it is under way


class Pace:
    """Estimates the time left from the last 20 steps; rich forgets after 30 s, and a step can
    take minutes.
    """

    def __init__(self, done: int, now: float) -> None:
        self._marks = deque([(done, now)], maxlen=20)

    def mark(self, done: int, now: float) -> None:
        """Note that ``done`` steps are done at the time ``now``."""
        if done <= self._marks[-1][0]:  # a step is repeated
            self._marks = deque([(done, now)], maxlen=20)
        else:
            self._marks.append((done, now))

    def seconds_left(self, total: int, now: float) -> float | None:
        """Return the seconds from ``now`` until ``total`` steps are done; None before the first
        step.
        """
        marks = tuple(self._marks)  # the bar's thread asks while steps are marked
        (first, since) = marks[0]
        (done, until) = marks[-1]
        if done == first:
            return None
        step_seconds = (until - since) / (done - first)
        seconds_since = now - until
        return max(step_seconds * (total - done) - seconds_since, 0.0)


class StepShare:
    """Estimates how much of a step's time is over: as much as in the step before, when that had got
    as much done.

    A beat is a token step, a micro-batch or a scored row: how long one takes differs, and repeats
    in each step.
    """

    def __init__(self, now: float) -> None:
        self._beats = 0
        self._began = (0, now)
        self._curve = [(0, 0.0)]  # beats and seconds of this step
        self._last = [(0, 0.0)]  # those of the step before

    def count(self, beats: int, now: float) -> float:
        """Return the share of the step under way, 0 in a run's first, when ``beats`` have been
        counted so far.
        """
        if beats < self._beats:  # the run is tried again
            self._began = (0, now)
            self._curve = [(0, 0.0)]
        self._beats = beats
        first_beat, began_at = self._began
        self._curve.append((beats - first_beat, now - began_at))
        _, seconds = self._last[-1]
        if not seconds:
            return 0.0
        return min(_MOST, _seconds_at(beats - first_beat, self._last) / seconds)

    def end_step(self, now: float) -> None:
        """Note that a step is done, and another one begins."""
        first_beat, began_at = self._began
        self._last = [*self._curve, (self._beats - first_beat, now - began_at)]
        self.begin_step(now)

    def begin_step(self, now: float) -> None:
        """Note that a step begins, and that what came before it was none."""
        self._began = (self._beats, now)
        self._curve = [(0, 0.0)]


def _seconds_at(beats: int, curve: Sequence[tuple[int, float]]) -> float:
    for (fewer, before), (more, after) in pairwise(curve):
        if beats < more:
            return before + (after - before) * (beats - fewer) / (more - fewer)
    return curve[-1][1]


class Progress:
    """Shows one run: call ``start``, then ``step`` and ``validation`` as they come, then ``close``
    in any case.

    ``under_way`` may be called at any time in between, and while the workers start.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        enabled: bool = True,
    ) -> None:
        self._total = total_steps
        self._console = PipeConsole() if console is None else console
        self._enabled = enabled
        self._pace = Pace(0, time.monotonic())
        self._printed_at = time.monotonic()
        self._step = 0
        self._share = StepShare(time.monotonic())
        self._begun = False
        self._shown = ""
        self._pass = ""
        self._pass_began = 0.0
        self._tenths = Tenths(0.0)
        self._bar: bars.Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = _make_bar(self._console, self._time_left)
            self._task = self._bar.add_task("train", total=total_steps, shown="")

    def start(self, dashboard_url: str | None, run_url: str, done: int = 0) -> None:
        """Print where the run is, and begin to count time. A resumed run has trained ``done``
        steps before.
        """
        self._pace = Pace(done, time.monotonic())
        self._step = done
        self._begun = True
        self._share.begin_step(time.monotonic())
        self.note(f"run        {run_url}")
        if dashboard_url:
            self.note(f"dashboard  {dashboard_url}")
        if self._bar:
            self._bar.update(self._task, completed=done)
            self._bar.start()

    def step(self, record: Record) -> None:
        """Show that the training step of ``record`` is done."""
        if not self._enabled:
            return
        done = record["step"]
        now = time.monotonic()
        self._pace.mark(done, now)
        self._share.end_step(now)
        self._step = done
        self._shown = shown = headline(record["metrics"])
        if self._bar:
            self._bar.update(self._task, completed=done, shown=shown)
        elif self._is_due(done, now):
            self._printed_at = now
            self.note(
                "  ".join(
                    part
                    for part in (f"step {done}/{self._total}", shown, self._time_left())
                    if part
                )
            )

    def under_way(self, beats: int, place: str, sampled: int = 0, to_sample: int = 0) -> None:
        """Show what gets done within a step: ``beats`` things so far in the run, most workers being
        in ``place``, where ``sampled`` of ``to_sample`` samples are complete.

        The bar moves; without a terminal, and while workers start, a line tells of it now and then.
        """
        now = time.monotonic()
        share = self._share.count(beats, now)
        if not self._enabled:
            return
        if self._pass:
            self._tell_of_pass(place, now, sampled, to_sample)
        elif self._begun and self._bar:
            shown = "  ".join(part for part in (self._shown, place) if part)
            self._bar.update(self._task, completed=self._step + share, shown=shown)
        elif place and now - self._printed_at >= (_SILENCE if self._begun else _START_SILENCE):
            self._printed_at = now
            about = "starting   "
            if self._begun:
                about = f"in step    {self._step + 1}/{self._total}  "
            self.note(about + (f"{share:.0%} done, {place}" if share else place))

    def _tell_of_pass(self, place: str, now: float, sampled: int, to_sample: int) -> None:
        """Print where a pass is: every tenth of its samples, or every half minute where it draws
        none.
        """
        if not place:
            return
        counted = ""
        if to_sample:
            if not self._tenths.is_due(sampled, to_sample, now):
                return
            counted = f"{sampled:,} of {to_sample:,} samples, "
        elif now - self._printed_at < _PASS_SILENCE:
            return
        self._printed_at = now
        minutes, seconds = divmod(round(now - self._pass_began), 60)
        self.note(f"{self._pass:<10} {counted}{minutes}:{seconds:02} so far, in {place}")

    def validation(
        self,
        step: int,
        metrics: Mapping[str, float | None],
        phase: Phase = Phase.VALIDATION,
    ) -> None:
        """Print the accuracy after ``step`` steps, and metrics over several samples a prompt,
        such as pass@8.
        """
        own = [
            value
            for name, value in metrics.items()
            if name.endswith("/samples") and value is not None
        ]
        accuracy = metrics.get("reward/mean")
        samples = min(own, default=metrics.get("samples"))
        parts = [
            f"{phase:<10}",
            f"step {step}",
            "no accuracy logged" if accuracy is None else f"accuracy {accuracy:.4f}",
        ]
        several = {
            name: value
            for name, value in metrics.items()
            if _is_of_several(name) and value is not None
        }
        parts += [f"{name} {value:.4f}" for name, value in several.items()]
        if samples is not None:
            parts.append(f"({samples:.0f} {'samples' if several else 'prompts'})")
        self.note("  ".join(parts))

    def note(self, text: str) -> None:
        """Print ``text`` above the bar without secrets, and otherwise unchanged: no markup, no
        colours, no breaks.
        """
        if self._enabled:
            self._console.print(Text(redacted(text)), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print ``text`` so that nobody overlooks it where there are colours; it goes on without
        them.
        """
        if self._enabled:
            self._console.print(Text(f"warning    {redacted(text)}", "bold yellow"), soft_wrap=True)

    def begin_pass(self, what: str) -> None:
        """Begin to show a single pass over some data, such as an evaluation; ``under_way`` tells
        of it from then on.
        """
        self._begun = True
        self._pass = what
        self._pass_began = time.monotonic()
        self._tenths = Tenths(self._pass_began)

    def arrivals(self, workers: int) -> AbstractContextManager[Callable[[int], None]]:
        """Return what shows the workers as they come, before the run begins."""
        return arrivals(workers, self._console, self._enabled)

    def transfer(self, what: str, nbytes: int) -> AbstractContextManager[Callable[[int], None]]:
        """Return what shows the bytes of a download as they come, before the run begins."""
        return transfer(what, nbytes, self._console, self._enabled)

    def close(self) -> None:
        """Restore the terminal. May be called twice."""
        self._begun = False
        if self._bar:
            self._bar.stop()

    def _time_left(self) -> str:
        return time_left(self._pace.seconds_left(self._total, time.monotonic()))

    def _is_due(self, done: int, now: float) -> bool:
        if done in (1, self._total):
            return True
        every = -(-self._total // _LINES)
        if done % every == 0:
            return True
        return now - self._printed_at >= _SILENCE


class _Steps(bars.ProgressColumn):
    """Shows the steps that are done, without the share of the one under way."""

    def render(self, task: bars.Task) -> Text:
        return Text(f"step {int(task.completed)}/{task.total:.0f}")


class _TimeLeft(bars.ProgressColumn):
    """Counts down between steps: rich renders it several times a second, from a thread of its
    own.
    """

    def __init__(self, left: Callable[[], str]) -> None:
        super().__init__()
        self._left = left

    def render(self, task: bars.Task) -> Text:
        return Text(self._left(), style="cyan")


def _make_bar(console: Console, left: Callable[[], str]) -> bars.Progress:
    return bars.Progress(
        _Steps(),
        bars.BarColumn(bar_width=20),
        bars.TextColumn("{task.fields[shown]}", markup=False),
        _TimeLeft(left),
        console=console,
    )


def headline(metrics: Mapping[str, float | None]) -> str:
    """Return ``reward 0.714  12,345 tokens/s``, or as much of it as was logged."""
    reward = metrics.get("reward/mean")
    speed = metrics.get("tokens_per_second")
    parts = []
    if reward is not None:
        parts = [f"reward {reward:.3f}"]
    return "  ".join(parts if speed is None else [*parts, f"{speed:,.0f} tokens/s"])


def _is_of_several(name: str) -> bool:
    """Return True for ``pass@8`` and ``maj@8``; not for ``pass@1``, ``mean@8`` (the accuracy),
    nor for one source's.
    """
    kind, _, k = name.partition("@")
    if kind == "mean" or not k.isdecimal():
        return False
    return int(k) > 1


def time_left(seconds: float | None) -> str:
    """Return ``1:02:03 left``; an empty text while it is unknown."""
    if seconds is None:
        return ""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minute:02}:{second:02} left"
    return f"{minute}:{second:02} left"
