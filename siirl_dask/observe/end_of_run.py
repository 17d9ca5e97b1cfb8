"""Prints how a run ended: its numbers, samples before and after, the files, and commands to type
next.

print_end_of_run(console, EndOfRun(summary=summary, before=rows, after=rows_now, files=files,
next_lines=lines))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from siirl_dask.errors import counted
from siirl_dask.observe.console import chat_text, printable
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
    first_reward: float | None = None
    """Mean training reward of the first steps; None where these are the last ones too."""
    last_reward: float | None = None
    """Mean training reward of the last steps."""
    before: Sequence[Sample] = ()
    """Rows of the first validation; those whose prompt is in ``after`` too are shown first."""
    after: Sequence[Sample] = ()
    """Rows of the last validation."""
    changes: str = ""
    """A sentence on how many prompts' rewards rose and fell."""
    next_lines: Mapping[str, str] = field(default_factory=dict)
    """Commands to type next, by what they show."""


def print_end_of_run(console: Console, ended: EndOfRun) -> None:
    """Print it. Files and commands are lines of their own, however long: they are pasted."""
    console.print(_headline(ended.summary))
    console.print(_numbers(ended))
    if ended.before or ended.after:
        console.print(_title("Validation samples, before and after"))
        if ended.changes:
            console.print(Text(f"  {ended.changes}", style="dim"), soft_wrap=True)
        console.print(_samples(ended.before, ended.after))
    for title, lines in {"Files": ended.files, "Next": ended.next_lines}.items():
        if not lines:
            continue
        console.print(_title(title))
        width = max(map(len, lines))
        for name, line in lines.items():
            text = Text.assemble((f"  {name:<{width}}  ", "dim"), printable(line))
            console.print(text, soft_wrap=True)


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


def _numbers(ended: EndOfRun) -> Table:
    summary = ended.summary
    scores = summary.validation
    moved = summary.bytes_per_step
    test_accuracy = ""
    if scores.test is not None:
        test_accuracy = _score(scores.test)
    speed = "not measured"
    if summary.samples_per_second is not None:
        speed = f"{summary.samples_per_second:,.1f}"
    workers = counted(summary.workers, "worker")
    rows = {
        "training reward": _change(ended.first_reward, ended.last_reward),
        "validation accuracy": _change(scores.first, scores.last),
        "test accuracy": test_accuracy,
        "samples/s": speed,
        "steps": f"{summary.steps:,} in {summary.seconds:,.1f} s on {workers}",
        "worker to worker": _size(moved.peers),
        "scheduler and client": _size(moved.scheduler_and_client),
    }
    slow = summary.slowest
    if slow is not None:
        rows["slowest"] = (
            f"node {printable(slow.node)} on worker {printable(slow.worker)}, {slow.share:.0%} of "
            "the time"
        )
    if summary.warnings:
        rows["drift"] = "\n".join(printable(text) for text in summary.warnings)
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in rows.items():
        if value:
            table.add_row(name, Text(value))
    return table


def _change(first: float | None, last: float | None) -> str:
    """Return ``0.4961 -> 0.8125``, the last alone where there is no first, "" for neither."""
    if first is None and last is None:
        return ""
    if first is None:
        return _score(last)
    return f"{_score(first)} -> {_score(last)}"


def _samples(before: Sequence[Sample], after: Sequence[Sample]) -> Table:
    was = {_text(row.get("prompt")): row for row in before}
    now = {_text(row.get("prompt")): row for row in after}
    in_both = [prompt for prompt in was if prompt in now]
    prompts = list(dict.fromkeys([*in_both, *was, *now]))
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


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _text(value: object) -> str:
    """Return a prompt, an answer or a response as a few lines of plain text."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = chat_text(value)
    text = printable("" if value is None else str(value)).strip()
    if len(text) <= _LONGEST:
        return text
    return f"{text[: _LONGEST - 1]}…"


def _score(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.4f}"


def _size(nbytes: float | None) -> str:
    if nbytes is None:
        return "not measured"
    if nbytes >= 1e5:
        return f"{nbytes / 1e6:,.2f} MB per step"
    return f"{nbytes / 1e3:,.1f} kB per step"
