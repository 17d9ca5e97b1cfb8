"""Tells of one run in a report: samples, time, data movement, its DAG, failures and starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from siirl_dask.observe.trace.bottleneck import Bottleneck, WorkerTime, longest_wait, moving_share
from siirl_dask.planner import Phase
from siirl_dask.trace import Lane
from siirl_dask.views.charts.colours import COLOURS
from siirl_dask.views.charts.figures import duration, number, size
from siirl_dask.views.charts.series import series_of
from siirl_dask.views.html_page import bar, safe, shortened, table
from siirl_dask.views.report.dag_picture import Drawable, draw_dag
from siirl_dask.views.report.gather import RunFacts, Samples
from siirl_dask.views.report.timeline import draw_timeline
from siirl_dask.views.samples.answer import conversation, headings, lineage, reward_parts, speaker
from siirl_dask.views.samples.sample_html import pictures_as_html
from siirl_dask.wording import redacted

_WORKERS = 32
_NODES = 20
_RESTARTS = 50
_TOLD = 0.01  # share of the time; how workers differ in less is chance
_EVEN = 1.1  # times the others' median: what is less is no news
_MOVED = {
    "bytes/peers": "from worker to worker",
    "bytes/hosts": "of these from host to host",
    "bytes/early": "of these before their table was whole",
    "bytes/broadcast": "weights by broadcast",
}


def samples(run: RunFacts) -> str:
    """Return validation prompts before and after, or the best and worst samples of the last
    step.
    """
    found = run.samples
    if found is None:
        return _missing(run, "samples")
    if found.pairs:
        sentence = f"{safe(found.words)} The largest changes first:"
        return (
            f"<p>Validations after step {found.then} and step {found.now}. "
            f"{sentence}</p>{_pairs(found)}"
        )
    parts = [
        f"<p>There are no two validations to compare; these are of training step {found.now}.</p>"
    ]
    for words, rows in (("best", found.best), ("worst", found.worst)):
        parts += [_sample(f"{words}: {headings(row)}", row) for row in rows]
    return "".join(parts)


def _pairs(found: Samples) -> str:
    parts = []
    for row in found.pairs:
        kind = ""
        if row["change"] > 0:
            kind = "rose"
        elif row["change"] < 0:
            kind = "fell"
        sides = "".join(
            f"<div><h4>after step {step}: reward <span "
            f'class="{kind * later}">{number(row[name])}</span></h4>'
            f"<pre>{shortened(row[f'{name}_response'])}</pre></div>"
            for name, step, later in (("then", found.then, False), ("now", found.now, True))
        )
        head = f"{pictures_as_html(row)}<h4>prompt</h4><pre>{shortened(row['prompt'])}</pre>"
        answer = ""
        if row["answer"] is not None:
            answer = f"<h4>answer</h4><pre>{shortened(row['answer'])}</pre>"
        parts.append(
            "<article><div "
            f'class="pair"><div>{head}</div><div>{answer}</div>{sides}</div></article>'
        )
    return "".join(parts)


def _sample(heading: str, row: Mapping[str, Any]) -> str:
    texts = {
        **{name: row.get(name) for name in ("prompt", "response", "answer")},
        "parts": reward_parts(row),
    }
    texts["from"] = lineage(row)
    parts = []
    for name, text in texts.items():
        if name == "response" and (said := conversation(row)):
            parts += [
                f"<h4>{safe(speaker(one))}</h4><pre>{shortened(one['text'])}</pre>" for one in said
            ]
        elif text not in (None, ""):
            parts.append(f"<h4>{name}</h4><pre>{shortened(text)}</pre>")
    return f"<article><h3>{safe(heading)}</h3>{pictures_as_html(row)}{''.join(parts)}</article>"


def timing(run: RunFacts) -> str:
    """Return who and what is slow, a timeline of one step, and tables of nodes and workers."""
    found = run.timing
    if found is None:
        return _missing(run, "trace")
    first = found.steps[0]
    last = found.steps[-1]
    slow = found.bottleneck
    parts = [f"<p>From the trace of steps {first:,} to {last:,}. {' '.join(_told(slow))}</p>"]
    if found.step:
        parts.append(f"<h4>step {found.step[0].step:,}, of median length</h4>")
        parts.append(f'<div class="scroll">{draw_timeline(found.step)}</div>')
    return "".join(
        [
            *parts,
            "<h4>nodes, validations included</h4>",
            _nodes(slow),
            "<h4>workers</h4>",
            _workers(slow),
        ]
    )


def _told(found: Bottleneck) -> Iterator[str]:
    one = found.slowest
    if one:
        yield (
            f"Slowest is node <b>{safe(one.node)}</b> on worker <b>{safe(one.worker)}</b>: "
            f"{duration(one.seconds)} a step, {one.share:.0%} of the time."
        )
    one = found.uneven
    if one and one.times_others and one.times_others > _EVEN:
        yield (
            f"Node <b>{safe(one.node)}</b> takes {one.times_others:.1f} times as long on worker "
            f"<b>{safe(one.worker)}</b> as on the others."
        )
    if found.start:
        yield (
            f"Before the first step {safe(found.start.node)} took longest, "
            f"{duration(found.start.seconds)}."
        )


def _nodes(found: Bottleneck) -> str:
    rows = [
        (
            safe(one.node),
            safe(one.worker),
            duration(one.seconds),
            f"{one.share:.0%}",
            bar([("compute", min(1.0, one.share))]),
            f"{one.times_others:.2f}" if one.times_others and one.share >= _TOLD else "",
        )
        for one in found.nodes[:_NODES]
    ]
    return table(
        ("node", "slowest on", "a step", "share of the time", "", "times the others"), rows
    )


def _workers(found: Bottleneck) -> str:
    shown = found.workers[:_WORKERS]
    rows = [
        (
            safe(worker.worker),
            bar(_shares(worker)),
            *(f"{share:.0%}" for _, share in _shares(worker)),
            _longest_wait(worker),
        )
        for worker in shown
    ]
    more = ""
    if len(found.workers) > _WORKERS:
        more = f'<p class="note">{len(found.workers) - len(shown)} more workers</p>'
    return (
        table(("worker", "", "computes", "moves", "waits", "other", "waits most"), rows, texts=(6,))
        + more
    )


def _shares(worker: WorkerTime) -> list[tuple[str, float]]:
    return [
        ("compute", worker.share([Lane.COMPUTE])),
        ("transfer", moving_share(worker)),
        ("wait", worker.share([Lane.WAIT])),
        ("rest", max(0.0, 1 - worker.explained)),
    ]


def _longest_wait(worker: WorkerTime) -> str:
    longest = longest_wait(worker)
    if longest is None:
        return ""
    name, cause, share = longest
    if not cause:
        return f"{share:.0%} at {safe(name)}"
    return f"{share:.0%} at {safe(name)} for worker {safe(cause)}"


def movement(run: RunFacts) -> str:
    """Return the bytes that moved, in all and on each edge."""
    rows = []
    for name, words in _MOVED.items():
        values = [value for _, value in series_of(run.records, Phase.TRAIN, name)]
        if any(values):
            rows.append((words, size(sum(values) / len(values)), size(sum(values))))
    if run.summary and (through := run.summary.bytes_per_step.scheduler_and_client) is not None:
        rows.append(("through scheduler and client, none of them rows", size(through), ""))
    body = '<p class="note">No bytes moved between workers.</p>'
    if rows:
        body = table(("bytes", "a step", "in all"), rows)
    measured = None
    if run.timing:
        measured = run.timing.measured
    edges = []
    if measured:
        edges = sorted(measured.edges.items(), key=lambda item: -item[1].received)
    moved = [
        (safe(name), size(edge.received), duration(edge.moving), duration(edge.waiting))
        for name, edge in edges
    ]
    heads = ("edge", "bytes a step", "moves, at most", "waits for its rows, at most")
    if moved:
        body += f"<h4>edges, of an average traced step</h4>{table(heads, moved)}"
    return body


def picture(run: RunFacts) -> str:
    """Return the DAG with its measurements."""
    measured = None
    if run.timing:
        measured = run.timing.measured
    dag = Drawable.of(run.dag, measured)
    if dag is None:
        missing = _missing(run, "DAG")
        if missing:
            return missing
        return '<p class="note">The run recorded no DAG that can be drawn.</p>'
    note = "Nothing was measured of it: the run has no trace."
    if measured:
        note = (
            "Seconds are those of the slowest worker in an average training step, without its waits; "
            "bold arrows carry bytes between workers."
        )
    roles = "".join(
        f'<span><i class="c{at % len(COLOURS)}"></i>role {safe(role)}{_placed(run, role)}</span> '
        for at, role in enumerate(dag.roles)
    )
    return (
        f'<p class="note">{note}</p><p class="key">{roles}</p><div '
        f'class="scroll">{draw_dag(dag, measured)}</div>'
    )


def _placed(run: RunFacts, role: str) -> str:
    if run.config is None:
        return ""
    workers = run.config.cluster.placement.get(role)
    if workers:
        return f" on workers {', '.join(map(str, workers))}"
    return " on all workers"


def failures(run: RunFacts) -> str:
    """Return what failed and how the run went on, and its starts."""
    parts = []
    summary = run.summary
    if summary and summary.error:
        parts.append(f'<div class="error"><pre>{shortened(redacted(summary.error))}</pre></div>')
    elif summary:
        parts.append(f"<p>The run ended as <b>{summary.status}</b>.</p>")
    else:
        parts.append(_missing(run, "summary"))
    if summary and summary.restarts:
        rows = [
            (
                f"<pre>{shortened(redacted(one.cause))}</pre>",
                f"{one.steps:,}",
                duration(one.silence),
                duration(one.seconds),
                f"{one.steps_again:,}",
                "-" if one.workers is None else f"{one.workers:,}",
            )
            for one in summary.restarts[:_RESTARTS]
        ]
        heads = (
            "cause",
            "steps done",
            "noticed after",
            "at work after",
            "steps again",
            "workers then",
        )
        parts += ["<h4>the last start went on by itself after</h4>", table(heads, rows)]
    return "".join(parts) + _starts(run)


def _starts(run: RunFacts) -> str:
    steps: dict[int, list[int]] = {}
    for record, attempt in run.attempts:
        if record["phase"] == Phase.TRAIN:
            steps.setdefault(attempt, []).append(record["step"])
    rows = [
        (
            f"{one.number}",
            safe(one.owner.started),
            safe(one.owner.host),
            _between(steps.get(one.number, [])),
        )
        for one in run.starts
    ]
    missing = ""
    if not rows:
        missing = _missing(run, "starts")
    if missing:
        return missing
    heads = ("number", "time", "host", "steps that count")
    return "<h4>starts and restarts</h4>" + table(heads, rows, texts=(1, 2, 3))


def _between(steps: list[int]) -> str:
    if not steps:
        return "none"
    if len(steps) > 1:
        return f"{min(steps):,} to {max(steps):,}"
    return f"{steps[0]:,}"


def _missing(run: RunFacts, part: str) -> str:
    if part in run.missing:
        return f'<p class="note">{safe(run.missing[part])}</p>'
    return ""
