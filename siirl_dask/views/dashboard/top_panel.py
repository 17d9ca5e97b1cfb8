"""The head of the page: which run, how far it is, and what took longest in its last steps, by
name.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from bokeh.layouts import row
from bokeh.models.widgets import Button, Div, MultiChoice, Select

from siirl_dask.config.secrets import redacted
from siirl_dask.observe.trace.bottleneck import Bottleneck
from siirl_dask.views.charts.figures import duration, number
from siirl_dask.views.dashboard.records import latest
from siirl_dask.views.dashboard.store import LiveRun
from siirl_dask.views.dashboard.style import TEXTS, WIDGETS

_EVEN = 1.1  # times the others' median: what is less is no news


class TopPanel:
    """Shows the run's state, and lets the viewer choose the run, and others beside it."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._newest = ""
        self._urls: dict[str, str] = {}
        self._offered: list[str] = []
        self._run = Select(title="run", options=[], width=220, stylesheets=[WIDGETS])
        self._run.on_change("value", lambda attribute, old, new: changed())
        self._others = MultiChoice(
            title="over it, from the same folder",
            options=[],
            width=300,
            stylesheets=[WIDGETS],
            max_items=7,
        )
        self._others.on_change("value", lambda attribute, old, new: changed())
        self._told = Div(
            text="", name="state", stylesheets=[TEXTS], sizing_mode="stretch_width", min_width=320
        )
        self.button = Button(label="dark", width=60, stylesheets=[WIDGETS])
        self.root = row(
            self._told, self._run, self._others, self.button, sizing_mode="stretch_width"
        )

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
            if watches_newest:
                self._run.value = redacted(self._newest)

    def offer_others(self, names: Sequence[str]) -> None:
        """Offer to show these runs over the one that is watched."""
        if list(names) != self._offered:
            self._offered = list(names)
            self._others.options = list(names)
            self._others.value = [name for name in self._others.value if name in names]

    def show(
        self, run: LiveRun | None, status: str, found: Bottleneck | None, silent: float
    ) -> None:
        """Show how far the run is, and what took longest; ``silent`` is seconds without any
        progress.
        """
        if run is None:
            self._told.text = '<span class="big">no run has used this scheduler yet</span>'
            return
        lines = [_state(run, status, silent), *(_slowest(found) if found is not None else ())]
        text = "<br>".join(lines)
        if text != self._told.text:
            self._told.text = text


def _state(run: LiveRun, status: str, silent: float) -> str:
    metrics = latest(run.records)
    train = [record for record in run.records[-50:] if record["phase"] == "train"]
    facts = [html.escape(status), f"step {run.step} of {run.steps}"]
    if (reward := metrics.get("reward/mean")) is not None:
        facts.append(f"reward {number(reward)}")
    if train:
        seconds = sum(record["seconds"] for record in train) / len(train)
        facts.append(f"{duration(seconds)} a step")
    if (speed := metrics.get("tokens_per_second")) is not None:
        facts.append(f"{number(speed)} tokens/s")
    quiet = f' <span class="bad">nothing got done for {silent:.0f} s</span>' if silent > 10 else ""
    name = html.escape(run.name)
    return f'<span class="big">{name}</span> &nbsp;{" &middot; ".join(facts)}{quiet}'


def _slowest(found: Bottleneck) -> list[str]:
    lines = []
    if (slowest := found.slowest) is not None:
        node = html.escape(slowest.node)
        worker = html.escape(slowest.worker)
        lines.append(
            f"<span class='soft'>slowest</span> node <b>{node}</b> on worker <b>{worker}</b>: "
            f"{duration(slowest.seconds)} a step, <b>{slowest.share:.0%}</b> of the time"
        )
    if (uneven := found.uneven) is not None and uneven.times_others and uneven.times_others > _EVEN:
        node = html.escape(uneven.node)
        worker = html.escape(uneven.worker)
        lines.append(
            f"<span class='soft'>uneven</span> node <b>{node}</b> takes {uneven.times_others:.1f} "
            f"times as long on worker <b>{worker}</b> as on the others"
        )
    return lines
