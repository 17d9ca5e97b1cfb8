"""A report as one HTML page that loads and runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from siirl_dask import __version__
from siirl_dask.views.charts.colours import class_of
from siirl_dask.views.charts.figures import duration, number
from siirl_dask.views.charts.line_chart import MOST_POINTS
from siirl_dask.views.html_page import html_page, safe, table
from siirl_dask.views.report.configuration import dag_differences, differences, settings
from siirl_dask.views.report.curves import headline_charts, other_charts
from siirl_dask.views.report.gather import RunFacts
from siirl_dask.views.report.run_parts import failures, movement, picture, samples, timing
from siirl_dask.views.report.style import STYLE
from siirl_dask.wording import redacted

_CHANGES = 40  # of a DAG


def page(runs: Sequence[RunFacts]) -> str:
    """Return the page for one run, or for several that are compared."""
    title = ", ".join(run.label for run in runs)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    body = "\n".join(
        [
            f"<h1>{safe(title)}</h1>",
            _contents(runs),
            _cards(runs),
            _curves(runs),
            _configuration(runs),
            *(_run(number, run, alone=len(runs) == 1) for number, run in enumerate(runs)),
            _others(runs),
            f"<footer><p>Written by siirl_dask {safe(__version__)} on {now}; "
            "this file needs no other, and loads nothing.</p></footer>",
        ]
    )
    return html_page(title, STYLE, body)


def _contents(runs: Sequence[RunFacts]) -> str:
    named = {"curves": "Curves", "configuration": "Configuration"}
    if len(runs) == 1:
        named |= {
            "samples-0": "Samples",
            "time-0": "Time",
            "data-0": "Data movement",
            "dag-0": "DAG",
            "failures-0": "Failures",
        }
    else:
        named |= {f"run-{at}": safe(run.label) for at, run in enumerate(runs)}
    named["others"] = "All other metrics"
    return (
        f"<nav>{''.join(f'<a href=#{place}>{words}</a>' for place, words in named.items())}</nav>"
    )


def _cards(runs: Sequence[RunFacts]) -> str:
    alone = ""
    if len(runs) == 1:
        alone = " alone"
    return (
        f'<div class="runs{alone}">{"".join(_card(at, run) for at, run in enumerate(runs))}</div>'
    )


def _card(at: int, run: RunFacts) -> str:
    summary = run.summary
    status = ""
    if summary:
        status = f'<span class="chip {summary.status}">{summary.status}</span>'
    planned = ""
    if run.config:
        planned = f" of {run.config.run.steps:,}"
    facts = {"steps": f"{run.steps:,}{planned}"}
    if summary is not None:
        scores = summary.validation
        if scores.first is not None or scores.last is not None:
            facts["validation reward"] = f"{number(scores.first)} &rarr; {number(scores.last)}"
        if scores.test is not None:
            facts["test reward"] = number(scores.test)
        facts |= {"time": duration(summary.seconds), "workers": f"{summary.workers:,}"}
        if summary.samples_per_second is not None:
            facts["samples a second"] = number(summary.samples_per_second)
        slow = summary.slowest
        if slow:
            facts["slowest"] = f"{safe(slow.node)} on worker {safe(slow.worker)}, {slow.share:.0%}"
    else:
        status = '<span class="chip open">no end recorded</span>'
    if run.config:
        facts["model"] = safe("/".join(redacted(run.config.model.path).rstrip("/").split("/")[-2:]))
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return (
        f'<div class="run {class_of(at)}"><h3>{safe(run.label)}{status}</h3>'
        f'<p class="url">{safe(redacted(run.url))}</p><dl>{rows}</dl></div>'
    )


def _curves(runs: Sequence[RunFacts]) -> str:
    charts = headline_charts(runs)
    body = '<p class="note">No metrics were logged.</p>'
    if charts:
        body = _grid(charts, runs)
    return f'<h2 id="curves">Curves</h2>{_key(runs)}{body}{_missing(runs, "metrics")}'


def _key(runs: Sequence[RunFacts]) -> str:
    """Return the runs' colours, and how to read a band, where there is something to explain."""
    parts = [
        f'<span><i class="{class_of(at)}"></i>{safe(run.label)}</span>'
        for at, run in enumerate(runs)
    ]
    thinned = any(run.steps > MOST_POINTS for run in runs)
    words = ""
    if thinned:
        words = "Lines are means of neighbouring steps, bands their extremes."
    return f'<p class="key">{"".join(parts) if len(runs) > 1 else ""} {words}</p>'


def _configuration(runs: Sequence[RunFacts]) -> str:
    body = _own_settings(runs[0]) if len(runs) == 1 else _compared(runs)
    missing = _missing(runs, "configuration")
    return f'<h2 id="configuration">Configuration{", where the runs differ" * (len(runs) > 1)}</h2>{body}{missing}'


def _own_settings(run: RunFacts) -> str:
    if run.config is None:
        return ""
    own = settings(run.config)
    rows = [
        (f"<code>{safe(key)}</code>", safe(value), safe(usual))
        for key, (value, usual) in own.items()
    ]
    body = table(("key", "value", "default"), rows, texts=(1, 2))
    sentence = "1 key differs from its default"
    if len(rows) != 1:
        sentence = f"{len(rows)} keys differ from their defaults"
    return f"<p>{sentence}.</p><details><summary>show them</summary>{body}</details>"


def _compared(runs: Sequence[RunFacts]) -> str:
    rows = [
        (f"<code>{safe(key)}</code>", *map(safe, values))
        for key, values in differences(runs).items()
    ]
    heads = ("key", *(safe(run.label) for run in runs))
    body = '<p class="note">No key differs.</p>'
    if rows:
        body = table(heads, rows, texts=range(1, len(heads)))
    return f"{body}{''.join(_dag_changes(runs[0], run) for run in runs[1:])}"


def _dag_changes(first: RunFacts, other: RunFacts) -> str:
    if not (first.dag["nodes"] and other.dag["nodes"]):
        return ""
    changes = dag_differences(first, other)
    if not changes:
        return f'<p class="note">The DAG of {safe(other.label)} is that of {safe(first.label)}.</p>'
    more = ""
    if len(changes) > _CHANGES:
        more = f"\n... {len(changes) - _CHANGES} more"
    lines = "\n".join(safe(change) for change in changes[:_CHANGES])
    return (
        f"<details><summary>{len(changes)} changes of the DAG from {safe(first.label)} to "
        f"{safe(other.label)}</summary><pre>{lines}{more}</pre></details>"
    )


def _run(at: int, run: RunFacts, *, alone: bool) -> str:
    level = 3
    if alone:
        level = 2
    parts = {
        "samples": ("Samples", samples(run)),
        "time": ("Where the time went", timing(run)),
        "data": ("Data movement", movement(run)),
        "dag": ("The DAG", picture(run)),
        "failures": ("Failures and starts", failures(run)),
    }
    body = "".join(
        f'<h{level} id="{name}-{at}">{words}</h{level}>{text}'
        for name, (words, text) in parts.items()
    )
    if alone:
        return body
    heading = (
        f'<h2 id="run-{at}"><span class="{class_of(at)}">&#9632;</span> {safe(run.label)}</h2>'
    )
    return (
        f"{heading}<details{' open' * (at == 0)}><summary>samples, time, data, DAG, "
        f"failures</summary>{body}</details>"
    )


def _others(runs: Sequence[RunFacts]) -> str:
    charts, more = other_charts(runs)
    if not charts:
        return ""
    left = ""
    if more:
        left = f'<p class="note">{more} more metrics are not shown.</p>'
    return (
        f'<h2 id="others">All other metrics</h2><details><summary>{len(charts)} charts</summary>'
        f"{_grid(charts, runs)}{left}</details>"
    )


def _grid(charts: Sequence[str], runs: Sequence[RunFacts]) -> str:
    return f'<div class="charts{" several" if len(runs) > 1 else ""}">{"".join(charts)}</div>'


def _missing(runs: Sequence[RunFacts], part: str) -> str:
    return "".join(_told(runs, part))


def _told(runs: Sequence[RunFacts], part: str) -> Iterator[str]:
    for run in runs:
        if part in run.missing:
            yield f'<p class="note">{safe(run.label)}: {safe(run.missing[part])}</p>'
