"""The page itself: one object per viewer, which looks every half second whether there is
anything new to show.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bokeh.events import ButtonClick

from siirl_dask.observe import Record, Summary, read_summary
from siirl_dask.observe.trace.bottleneck import Bottleneck, find_bottleneck
from siirl_dask.observe.trace.trace_table import in_order
from siirl_dask.observe.trace.transfers import Transfers, transfers
from siirl_dask.runs.samples.prompt_images import StoredPromptImages
from siirl_dask.runs.samples.sample_rows import Choice, SampleRow, newest_samples, whole_sample
from siirl_dask.runs.samples.token_texts import pieces
from siirl_dask.runs.trace import Parts, read_newest
from siirl_dask.trace import START, Lane
from siirl_dask.views.dashboard.curves_panel import CurvesPanel
from siirl_dask.views.dashboard.neighbours import metrics_tail, runs_beside
from siirl_dask.views.dashboard.reader import Held
from siirl_dask.views.dashboard.records import merged
from siirl_dask.views.dashboard.samples_panel import SamplesPanel, Seen
from siirl_dask.views.dashboard.source import PageSource
from siirl_dask.views.dashboard.store import MOST_RECORDS, LiveRun, RunEnding
from siirl_dask.views.dashboard.style import farewells, themes
from siirl_dask.views.dashboard.timeline import Timeline, timeline
from siirl_dask.views.dashboard.timeline_panel import MOST_LANES, TimelinePanel
from siirl_dask.views.dashboard.top_panel import Head, HeadSample, TopPanel
from siirl_dask.views.dashboard.workers_panel import WorkersPanel, engine_requests

_EVERY_MS = 500
_OTHERS = 5.0  # seconds between two readings of what this run's steps do not change
# seconds for which the samples stay: rows that change under the mouse cannot be clicked
_CALM = 4.0
_PICTURES = 12  # images of a prompt, as thumbnails of 20 kB at most
_STEPS = 2  # of the timeline
# whose counts are shown: not the progress of nodes
_COUNTS = (Lane.CONTROL, Lane.ENGINE, Lane.TRANSFER)
_LOOKED_FOR = 6  # steps among which the newest whole ones are
_MOST_BYTES = 2**23  # of several steps: with more workers the newest alone
_MOST_PARTS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """The trace of the last steps, as the panels show it."""

    steps: Sequence[int]
    timeline: Timeline
    found: Bottleneck
    moved: Transfers
    requests: Mapping[str, Sequence[tuple[float, int]]]
    nodes: Sequence[str]
    """Nodes in the order of their first starts."""
    parts: Parts
    """The parts that it was made of."""


def show_page(source: PageSource, template: Any, extra: Mapping[str, Any], doc: Any) -> None:
    """Make the document of one viewer, in a template of Jinja's that embeds the roots by name."""
    doc.title = "siirl: the run"
    doc.template = template
    doc.template_variables.update(extra)
    page = Page(source)
    page.update()  # before it is in the document, where each change costs more
    with doc.models.freeze():
        for name, root in page.roots.items():
            root.name = name
            doc.add_root(root)
    doc.add_periodic_callback(page.update, _EVERY_MS)
    doc.js_on_event("document_ready", page.recolour)
    lost, back = farewells(page.farewell)
    doc.js_on_event("connection_lost", lost)
    doc.js_on_event("client_reconnected", back)


class Page:
    """The page as one viewer sees it."""

    def __init__(self, source: PageSource) -> None:
        self._source = source
        self._store = source.store
        self._reader = source.store.reader
        self._top = TopPanel(self._forget)
        self._curves = CurvesPanel()
        self._timeline = TimelinePanel()
        self._workers = WorkersPanel()
        self._samples = SamplesPanel(self._forget_samples, self._look)
        self._seen: dict[str, object] = {}
        self._looked_at: tuple[int, int] | None = None
        self._beats = 0
        self._beat_at = time.monotonic()
        self._pulses_at = float("-inf")
        self._newest = HeadSample()
        figures = [*self._curves.figures, *self._timeline.figures, *self._workers.figures]
        self.recolour, switch = themes(figures, self._top.button)
        self._top.button.js_on_event(ButtonClick, switch)

    @property
    def farewell(self) -> Any:
        """Text that the browser shows where it has lost the connection."""
        return self._top.farewell

    @property
    def roots(self) -> dict[str, Any]:
        return {
            "top": self._top.root,
            "controls": self._top.controls,
            "farewell": self._top.farewell,
            "curves": self._curves.root,
            "timeline": self._timeline.root,
            "samples": self._samples.root,
            "workers": self._workers.root,
        }

    def update(self) -> None:
        """Show what is new."""
        self._source.refresh()
        self._top.offer(list(self._store.runs.values()))
        run = self._store.runs.get(self._top.run)
        if run is None:
            self._top.show(None, Head())
            return
        now = time.monotonic()
        self._show_pulses(run, now)
        self._show_curves(run)
        traced = self._show_trace(run)
        self._show_samples(run)
        head = Head(
            ending=self._ending(run),
            goes_on=self._source.goes_on(run),
            found=traced.found if traced else None,
            silent=self._silent(run, now),
            sample=self._newest,
            is_served=self._source.is_served,
        )
        self._top.show(run, head)
        run.looked_at = now

    def _ending(self, run: LiveRun) -> RunEnding | None:
        """Return how the run ended; None while it goes on, or where it has not said."""
        if run.ended is not None or self._source.goes_on(run):
            return run.ended
        held: Held[Summary] = self._reader.get(
            ("summary", run.url), lambda: read_summary(run.url), run.plugin
        )
        if held.value is None:
            return None
        return RunEnding.of(held.value)

    def _forget(self) -> None:
        """Draw everything again: the viewer has chosen another run."""
        self._seen.clear()
        self._newest = HeadSample()
        self._pulses_at = float("-inf")

    def _forget_samples(self) -> None:
        self._seen.pop("samples", None)

    def _look(self, step: int, row_id: int) -> None:
        self._looked_at = (step, row_id)
        self._seen.pop("whole", None)

    def _is_new(self, what: str, version: object) -> bool:
        if self._seen.get(what) == version:
            return False
        self._seen[what] = version
        return True

    def _show_curves(self, run: LiveRun) -> None:
        siblings: Held[list[str]] = self._reader.get(
            ("beside", run.url), lambda: runs_beside(run.url), soon=_OTHERS
        )
        if siblings.value is not None:
            self._top.offer_others(siblings.value)
        earlier = self._metrics(run.url)
        others = {name: self._metrics(_beside(run.url, name)) for name in self._top.others}
        version = (
            run.url,
            run.version,
            earlier.version,
            *((name, held.version) for name, held in others.items()),
        )
        if self._is_new("curves", version):
            records: list[Record] = []
            if earlier.value:
                records = earlier.value
            if run.records:
                records = merged(_before(records, run.records[0]), run.records)
            shown = {run.name: records}
            self._curves.show(shown | {name: held.value or [] for name, held in others.items()})

    def _metrics(self, url: str) -> Held[list[Record]]:
        return self._reader.get(
            ("metrics", url), lambda: metrics_tail(url, MOST_RECORDS), soon=_OTHERS
        )

    def _show_trace(self, run: LiveRun) -> Traced | None:
        step = run.step
        before = self._reader.known(("trace", run.url)).value
        read = partial(_read_trace, run.url, step, before)
        held: Held[Traced | None] = self._reader.get(("trace", run.url), read, run.version)
        traced = held.value
        if self._is_new("trace", (run.url, traced, held.remark)):
            title = _title(traced)
            if traced:
                self._timeline.show(traced.timeline, traced.nodes, title, held.remark)
                self._workers.show_traced(traced.moved, traced.requests)
            else:
                self._timeline.show(None, (), title, held.remark)
        return traced

    def _show_samples(self, run: LiveRun) -> None:
        step = run.step
        choice = self._samples.choice
        key = ("samples", run.url, str(choice))
        read = partial(newest_samples, run.url, _steps(step), choice)
        held: Held[list[SampleRow]] = self._reader.get(key, read, step, soon=_CALM)
        rows = held.value
        if rows and choice is Choice.NEWEST:
            self._newest = HeadSample(rows[0].prompt, rows[0].response, rows[0].reward)
        if self._is_new(
            "samples",
            (key, held.remark, tuple(rows[:1]) if rows else (), len(rows or ()), rows is None),
        ):
            self._samples.show(rows, held.remark)
        if self._looked_at is None:
            return
        at, row_id = self._looked_at
        whole: Held[Seen | None] = self._reader.get(
            ("whole", run.url, at, row_id),
            lambda: _read_whole(run.url, at, row_id, run.tokenizer),
            seldom=3600.0,
        )
        if not whole.reading and self._is_new("whole", (run.url, at, row_id, whole.version)):
            self._samples.show_whole(whole.value, whole.error or "the sample is not there any more")

    def _show_pulses(self, run: LiveRun, now: float) -> None:
        if now - self._pulses_at < self._source.pulse_seconds() - _EVERY_MS / 2000:
            return  # workers have reported nothing since
        self._pulses_at = now
        pulses = self._source.pulses(run)
        if self._source.goes_on(run):
            run.live.note(now, pulses.readings)
        traced: Held[Traced | None] = self._reader.known(("trace", run.url))
        nodes: Sequence[str] = ()
        if traced.value:
            nodes = traced.value.nodes
        self._timeline.show_now(run.live, now, nodes)
        self._workers.show_states(pulses.states)

    def _silent(self, run: LiveRun, now: float) -> float:
        """Return the seconds since anything got done on any worker, as far as this viewer has
        seen.
        """
        beats = sum(own[-1].beats for own in run.live.stays.values() if own)
        if beats != self._beats or not beats or not self._source.goes_on(run):
            self._beats = beats
            self._beat_at = now
        return now - self._beat_at


def _steps(step: int) -> range:
    return range(max(1, step + 2 - _LOOKED_FOR), step + 2)


def _read_trace(url: str, step: int, before: Traced | None) -> Traced | None:
    """Return the trace of the last steps: what was read ``before``, where the run has written
    nothing since.
    """
    bounds = {"most_bytes": _MOST_BYTES, "most_parts": _MOST_PARTS}
    known = None
    if before:
        known = before.parts
    trace = read_newest(url, _steps(step)[-_STEPS - 1 :], **bounds, counts=_COUNTS, known=known)
    if trace is None:
        return before
    steps = trace.steps[-_STEPS:]
    spans = [span for span in trace.spans if span.step in steps and span.phase != START]
    if not spans:
        return None
    workers = in_order({span.worker for span in spans})
    nodes = dict.fromkeys(
        span.name for span in spans if span.lane is Lane.COMPUTE and span.what == "node"
    )
    first = min(span.start for span in spans if not span.is_count)
    drawn = timeline(spans, workers[:MOST_LANES])
    requests = engine_requests(spans, first)
    return Traced(
        steps,
        drawn,
        found=find_bottleneck(spans),
        moved=transfers(spans),
        requests=requests,
        nodes=list(nodes),
        parts=trace.parts,
    )


def _read_whole(url: str, step: int, row_id: int, tokenizer: str) -> Seen | None:
    sample = whole_sample(url, step, row_id)
    if sample is None:
        return None
    parts = [sample.token_ids]
    if sample.spans:
        parts = [sample.token_ids[span.start : span.stop] for span in sample.spans]
    pictures = StoredPromptImages(url, thumbnails=True, most=_PICTURES).of(sample.origin)
    return Seen(sample, pieces(tokenizer, parts), pictures)


def _title(traced: Traced | None) -> str:
    if traced is None:
        return '<span class="soft">no step of it has a trace yet (observe.trace)</span>'
    steps = f"step{'s' * (len(traced.steps) > 1)} {' and '.join(map(str, traced.steps))}"
    longest = max(
        (
            (seconds, worker.worker, *edge)
            for worker in traced.found.workers
            for edge, seconds in worker.waits.items()
        ),
        default=None,
    )
    waits = ""
    if longest is not None:
        nanoseconds, worker, name, cause = longest
        whom = ""
        if cause:
            whom = f" for worker {html.escape(cause)}"
        waits = (
            f", longest wait: worker {html.escape(worker)} {nanoseconds / 1e9:.2f} s at "
            f"{html.escape(name)}{whom}"
        )
    return f'<span class="soft">{steps}, {traced.found.seconds:.2f} s{waits}</span>'


def _before(earlier: Sequence[Record], first: Record) -> list[Record]:
    """Return the records of steps before the first that this scheduler has a report of."""
    return [record for record in earlier if record["step"] < first["step"]]


def _beside(url: str, name: str) -> str:
    head, slash, _ = url.rstrip("/").rpartition("/")
    return f"{head}{slash}{name}"
