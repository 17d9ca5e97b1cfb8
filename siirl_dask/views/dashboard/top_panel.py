"""The head of the page: does the run learn, is it healthy, what is it saying, and how long yet."""

from __future__ import annotations

import html
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.layouts import row
from bokeh.models.widgets import Button, Div, MultiChoice, Select

from siirl_dask.errors import counted
from siirl_dask.observe import Drift, Record, Status
from siirl_dask.observe.trace.bottleneck import Bottleneck
from siirl_dask.planner import Phase
from siirl_dask.views.charts.figures import duration, number
from siirl_dask.views.charts.series import series_of
from siirl_dask.views.charts.sparkline import sparkline
from siirl_dask.views.dashboard.records import latest
from siirl_dask.views.dashboard.store import LiveRun, RunEnding
from siirl_dask.views.dashboard.style import TEXTS, WIDGETS, echo
from siirl_dask.wording import redacted

_EVEN = 1.1  # times the others' median: what is less is no news
_ENDS = 5  # steps at each end of a run, whose mean rewards are compared
_RECENT = 20  # steps from which the time left is estimated
_SILENT = 10.0  # seconds
_TEXT = 220  # characters of a question or a response
_ERROR = 300
_DRIFTS = 3
_SPARK = 24
_LIVE = '<span class="chip live">training</span>'


@dataclass(frozen=True, slots=True)
class HeadSample:
    """A sample of the newest step; without a response there is none yet."""

    prompt: str = ""
    response: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Facts that the head says besides the records of the run."""

    goes_on: bool = False
    ending: RunEnding | None = None
    """How it ended, where it has said so."""
    found: Bottleneck | None = None
    silent: float = 0.0
    """Seconds without any progress."""
    sample: HeadSample = field(default_factory=HeadSample)
    is_served: bool = False
    """Whether a server of the page alone shows it: it may end, and the run go on."""


class TopPanel:
    """Shows the run's state, and lets the viewer choose the run, and others beside it."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._newest = ""
        self._urls: dict[str, str] = {}
        self._offered: list[str] = []
        self._drift = Drift()
        self._noted: tuple[str, int] = ("", 0)
        self._run = Select(title="run", options=[], width=200, stylesheets=[WIDGETS])
        self._run.on_change("value", lambda attribute, old, new: changed())
        self._others = MultiChoice(
            title="over it, from the same folder",
            options=[],
            width=260,
            stylesheets=[WIDGETS],
            max_items=7,
        )
        self._others.on_change("value", lambda attribute, old, new: changed())
        self._caption = Div(text="", name="state", stylesheets=[TEXTS], sizing_mode="stretch_width")
        self.root = row(self._caption, sizing_mode="stretch_width")
        self.button = Button(label="dark", width=60, stylesheets=[WIDGETS], align="end")
        self.controls = row(
            self._run, self._others, self.button, styles={"flex-wrap": "wrap"}, align="end"
        )
        self.farewell = Div(text="", name="farewell", visible=False)
        self._seen = Div(text="", visible=False)
        self.farewell.js_on_change("tags", echo(self.farewell, self._seen))
        self._seen.on_change("tags", lambda attribute, old, new: self._note_seen(new))
        self._run_at_end: LiveRun | None = None

    @property
    def run(self) -> str:
        """URL of the run that the viewer has chosen; empty before there is any."""
        chosen = str(self._run.value or "")
        return self._urls.get(chosen, chosen)

    @property
    def others(self) -> list[str]:
        """Names of the runs to see over it, of those that were offered: a browser may send any."""
        return [name for name in self._offered if name in self._others.value]

    def offer(self, runs: Sequence[LiveRun]) -> None:
        """Offer these runs, the newest last, which is taken at first."""
        options: list[str | tuple[Any, str]] = [
            (redacted(run.url), run.name or redacted(run.url)) for run in reversed(runs)
        ]
        if options != self._run.options:
            watches_newest = self.run == self._newest
            self._newest = runs[-1].url
            self._urls = {redacted(run.url): run.url for run in runs}
            self._run.options = options
            self._run.visible = len(options) > 1
            if watches_newest:
                self._run.value = redacted(self._newest)

    def offer_others(self, names: Sequence[str]) -> None:
        """Offer to show these runs over the one that is watched."""
        self._others.visible = bool(names)
        if list(names) != self._offered:
            self._offered = list(names)
            # Bokeh writes labels into the page as HTML
            self._others.options = [(name, html.escape(name)) for name in names]
            self._others.value = [name for name in self._others.value if name in names]

    def show(self, run: LiveRun | None, head: Head) -> None:
        """Show the answers to what is asked of every run first."""
        if run is None:
            self._caption.text = '<span class="big">no run has used this scheduler yet</span>'
            return
        self._note_drift(run)
        cells = {
            "Does it learn?": _learns(run.records),
            "Is it healthy?": _healthy(run, head, self._drift.said),
            "What is it saying?": _says(head.sample),
            "How long yet?": _time(run, head),
        }
        boxes = "".join(
            f"<div class='ask'><h3>{title}</h3>{''.join(lines)}</div>"
            for title, lines in cells.items()
        )
        text = f"{_title(run, head)}<div class='asks'>{boxes}</div>"
        if text != self._caption.text:
            self._caption.text = text
        farewell = _farewell(run, head)
        if farewell != self.farewell.text:
            self.farewell.text = farewell
        if run.ended is not None and self.farewell.tags != [run.version]:
            self._run_at_end = run
            self.farewell.tags = [run.version]

    def _note_seen(self, tags: Sequence[object]) -> None:
        """Note that a browser has got the end of the run."""
        if self._run_at_end is not None and list(tags) == [self._run_at_end.version]:
            self._run_at_end.shown = self._run_at_end.version

    def _note_drift(self, run: LiveRun) -> None:
        """Look for what drifts in the records that came since the last look."""
        url, until = self._noted
        if url != run.url or until > run.step:
            self._drift = Drift()
            until = 0
        for record in run.records:
            if record["phase"] == Phase.TRAIN and record["step"] > until:
                self._drift.note(record)
        self._noted = (run.url, run.step)


def _title(run: LiveRun, head: Head) -> str:
    ending = head.ending
    if head.goes_on:
        chip = _LIVE
    elif ending is None:
        chip = '<span class="chip lost">it has not said how it ended</span>'
    else:
        chip = (
            f'<span class="chip {html.escape(ending.status)}">{html.escape(ending.status)}</span>'
        )
    lines = [
        f'<span class="big">{html.escape(run.name)}</span> {chip} '
        f'<span class="soft">{html.escape(redacted(run.url))}</span>'
    ]
    if ending is not None and ending.error:
        lines.append(f'<span class="bad">{html.escape(redacted(ending.error)[:_ERROR])}</span>')
    if ending is not None and ending.resume:
        lines.append(f"<code>{html.escape(ending.resume)}</code> goes on with it")
    return "<br>".join(lines)


def _learns(records: Sequence[Record]) -> Iterator[str]:
    rewards = series_of(records, Phase.TRAIN, "reward/mean")
    if not rewards:
        yield "<p class='soft'>no step is done</p>"
        return
    values = [value for _, value in rewards]
    count = min(_ENDS, len(values))
    first = sum(values[:count]) / count
    last = sum(values[-count:]) / count
    change = f"reward {number(last)}"
    if len(values) > _ENDS:
        change = f"reward {number(first)} &rarr; {number(last)}"
    yield f"<p class='big'>{change}</p><p class='spark'>{sparkline(rewards, _SPARK)}</p>"
    scores = [f"means of {counted(count, 'step')}"]
    checked = [value for _, value in series_of(records, Phase.VALIDATION, "reward/mean")]
    if checked:
        scores.append(f"validation {number(checked[0])} &rarr; {number(checked[-1])}")
    tested = [value for _, value in series_of(records, Phase.TEST, "reward/mean")]
    if tested:
        scores.append(f"test {number(tested[-1])}")
    yield f"<p class='soft'>{' &middot; '.join(scores)}</p>"


def _healthy(run: LiveRun, head: Head, drifts: Sequence[str]) -> Iterator[str]:
    wrong = [html.escape(text) for text in drifts[-_DRIFTS:]]
    if head.goes_on and head.silent > _SILENT:
        wrong.append(f"nothing got done for {head.silent:.0f} s")
    failures = latest(run.records).get("reward/failures")
    if failures:
        wrong.append(f"{failures:.0f} rewards failed in the last step")
    if head.ending is not None and head.ending.status == Status.FAILED:
        wrong.append("it failed")
    if wrong:
        yield f"<p class='bad'>{'<br>'.join(wrong)}</p>"
    else:
        yield "<p class='big good'>nothing stands out</p>"
    for line in _slowest(head):
        yield f"<p>{line}</p>"


def _slowest(head: Head) -> Iterator[str]:
    if head.ending is not None and head.ending.slowest is not None:
        of_run = head.ending.slowest
        yield (
            f"<span class='soft'>slowest</span> node <b>{html.escape(of_run.node)}</b> on worker "
            f"<b>{html.escape(of_run.worker)}</b>: <b>{of_run.share:.0%}</b> of the time"
        )
        return
    if head.found is None:
        return
    slowest = head.found.slowest
    if slowest is not None:
        yield (
            f"<span class='soft'>slowest</span> node <b>{html.escape(slowest.node)}</b> on worker "
            f"<b>{html.escape(slowest.worker)}</b>: {duration(slowest.seconds)} a step, "
            f"<b>{slowest.share:.0%}</b> of the time"
        )
    uneven = head.found.uneven
    if uneven is not None and uneven.times_others and uneven.times_others > _EVEN:
        yield (
            f"<span class='soft'>uneven</span> node <b>{html.escape(uneven.node)}</b> takes "
            f"{uneven.times_others:.1f} times as long on worker "
            f"<b>{html.escape(uneven.worker)}</b> as on the others"
        )


def _says(sample: HeadSample) -> Iterator[str]:
    if not sample.prompt and not sample.response:
        yield "<p class='soft'>no sample is saved</p>"
        return
    yield f"<p class='soft said'>{_short(sample.prompt)}</p><p class='said'>{_short(sample.response)}</p>"
    if sample.reward is not None:
        yield f"<p class='soft'>reward {number(sample.reward)}, the newest of the samples below</p>"


def _short(text: str) -> str:
    line = " ".join(text.split())
    if len(line) > _TEXT:
        line = f"{line[: _TEXT - 1]}\u2026"
    return html.escape(line)


def _time(run: LiveRun, head: Head) -> Iterator[str]:
    left = _seconds_left(run)
    if not head.goes_on:
        seconds = run.seconds
        if head.ending is not None and head.ending.seconds is not None:
            seconds = head.ending.seconds
        yield f"<p class='big'>over, after {duration(seconds)}</p>"
    elif left is None:
        yield "<p class='big'>the first step is under way</p>"
    else:
        yield f"<p class='big'>about {duration(max(left, 1.0))} left</p>"
    share = 0.0
    if run.steps:
        share = min(1.0, run.step / run.steps)
    yield f"<div class='bar'><i style='width:{100 * share:.1f}%'></i></div>"
    facts = [f"step {run.step} of {run.steps}"]
    if head.goes_on and run.seconds:
        facts.append(f"{duration(run.seconds)} so far")
    recent = series_of(run.records[-2 * _RECENT :], Phase.TRAIN, "step_seconds")
    if recent:
        mean = sum(value for _, value in recent) / len(recent)
        facts.append(f"{duration(mean)} a step")
    speed = latest(run.records).get("tokens_per_second")
    if speed is not None:
        facts.append(f"{number(speed)} tokens/s")
    yield f"<p class='soft'>{' &middot; '.join(facts)}</p>"


def _seconds_left(run: LiveRun) -> float | None:
    """Return the seconds until the last step, as the last 20 and the validations among them took;
    None before the first.
    """
    steps = 0
    seconds = 0.0
    for record in reversed(run.records):
        seconds += record["seconds"]
        if record["phase"] == Phase.TRAIN:
            steps += 1
        if steps == _RECENT:
            break
    if not steps or not run.steps:
        return None
    return seconds / steps * (run.steps - run.step)


def _farewell(run: LiveRun, head: Head) -> str:
    """Return what the browser shows where the connection is lost: that of a page of ``serve`` with
    its server, else with the run; how the run ended, as far as it has said, and what to type.
    """
    url = redacted(run.url)
    ending = head.ending
    name = html.escape(run.name)
    lines = []
    if head.is_served:
        lines.append("<b>The server of this page has ended</b>, or cannot be reached.")
    if ending is not None:
        lines.append(
            f"<b>The run {name} has ended: {html.escape(ending.status)}</b>, after step {run.step} "
            f"of {run.steps}. What is below is how it was then."
        )
    elif head.is_served:
        lines.append(
            f"The run {name} needs no such server: it was at step {run.step} of {run.steps}, and "
            "what is below is how it was then."
        )
    else:
        lines.append(
            f"<b>This page has lost the run {name}</b> after step {run.step} of {run.steps}: its "
            "process has ended or cannot be reached, and what is below is old."
        )
    lines += [f"<code>siirl-dask serve {html.escape(shlex.quote(url))}</code> shows this page"]
    if ending is not None and ending.resume:
        lines.append(f"<code>{html.escape(ending.resume)}</code> goes on with it")
    return "<br>".join(lines)
