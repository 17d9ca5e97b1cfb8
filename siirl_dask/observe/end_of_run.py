"""Prints how a run ended: its numbers, samples before and after, the files, and commands to type
next.

console.print(render_end_of_run(EndOfRun(summary=summary, before=rows, after=rows_now, files=files,
next_lines=lines)))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from siirl_dask.errors import counted
from siirl_dask.observe.console import printable
from siirl_dask.observe.summary import Status, Summary

Sample = Mapping[str, object]
"""``prompt``, ``response``, ``answer``, ``reward`` of one validation row; a prompt may be a list
of chat messages."""

_SAMPLES = 3
_LONGEST = 300  # characters shown of a prompt, an answer or a response
_COLOURS = {Status.COMPLETE: "green", Status.FAILED: "red", Status.INTERRUPTED: "yellow"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfRun:
    """Everything that is shown."""

    summary: Summary
    files: Mapping[str, str] = field(default_factory=dict)
    """Files by description, such as ``{"every sample": "runs/quickstart/rollouts"}``."""
    before: Sequence[Sample] = ()
    """Rows of the first validation; those whose prompt is in ``after`` too are shown first."""
    after: Sequence[Sample] = ()
    """Rows of the last validation."""
    next_lines: Sequence[str] = ()
    """Commands to type next, one a line."""


def render_end_of_run(ended: EndOfRun) -> RenderableType:
    """Return it as something that a rich Console prints."""
    parts: list[RenderableType] = [_headline(ended.summary), _numbers(ended.summary)]
    if ended.before or ended.after:
        parts += [
            _title("Validation samples, before and after"),
            _samples(ended.before, ended.after),
        ]
    if ended.files:
        parts += [_title("Files"), _files(ended.files)]
    if ended.next_lines:
        parts += [
            _title("Next"),
            *(Padding(Text(printable(line)), (0, 0, 0, 2)) for line in ended.next_lines),
        ]
    return Group(*parts)


def _headline(summary: Summary) -> Text:
    text = Text.assemble(
        ("\nRun ", "bold"),
        (summary.run_id, "bold"),
        " ",
        (str(summary.status), _COLOURS[summary.status]),
    )
    if summary.error:
        text.append(f"\n{printable(summary.error)}", style=_COLOURS[summary.status])
    return text


def _numbers(summary: Summary) -> Table:
    scores = summary.validation
    moved = summary.bytes_per_step
    rows = {
        "validation accuracy": f"{_score(scores.first)} -> {_score(scores.last)}",
        "test accuracy": _score(scores.test),
        "samples/s": "not measured"
        if summary.samples_per_second is None
        else f"{summary.samples_per_second:,.1f}",
        "steps": f"{summary.steps:,} in {summary.seconds:,.1f} s on {counted(summary.workers, 'worker')}",
        "worker to worker": _size(moved.peers),
        "scheduler and client": _size(moved.scheduler_and_client),
    }
    if (slow := summary.slowest) is not None:
        rows["slowest"] = (
            f"node {printable(slow.node)} on worker {printable(slow.worker)}, {slow.share:.0%} of "
            "the time"
        )
    if scores.first is None and scores.last is None:
        rows["validation accuracy"] = _score(None)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _samples(before: Sequence[Sample], after: Sequence[Sample]) -> Table:
    was, now = ({_text(row.get("prompt")): row for row in rows} for rows in (before, after))
    prompts = sorted(
        dict.fromkeys([*was, *now]), key=lambda prompt: not (prompt in was and prompt in now)
    )
    table = Table(box=box.SIMPLE_HEAD, show_lines=True, pad_edge=False)
    for heading in ("prompt", "answer", "before", "after"):
        table.add_column(heading, overflow="fold", ratio=1 if heading == "answer" else 2)
    for prompt in islice(prompts, _SAMPLES):
        answer = (now.get(prompt) or was[prompt]).get("answer")
        table.add_row(
            Text(prompt),
            Text(_text(answer)),
            _response(was.get(prompt)),
            _response(now.get(prompt)),
        )
    return table


def _response(sample: Sample | None) -> Text:
    if sample is None:
        return Text("not generated", style="dim")
    text = Text(_text(sample.get("response")))
    reward = sample.get("reward")
    if isinstance(reward, (int, float)):
        text.append(f"\nreward {reward:g}", style="green" if reward > 0 else "red")
    return text


def _files(files: Mapping[str, str]) -> Padding:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, url in files.items():
        table.add_row(Text(name), Text(url))
    return Padding(table, (0, 0, 0, 2))


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _text(value: object) -> str:
    """Return a prompt, an answer or a response as a few lines of plain text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = "\n".join(
            printable(str(m["content"] if isinstance(m, Mapping) and "content" in m else m))
            for m in value
        )
    text = printable("" if value is None else str(value)).strip()
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _score(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return "not measured"
    return (
        f"{nbytes / 1e6:,.2f} MB per step" if nbytes >= 1e5 else f"{nbytes / 1e3:,.1f} kB per step"
    )
