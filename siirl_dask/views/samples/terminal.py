"""Prints answers to a terminal, of texts as much as fits; a pipe gets tables as wide as they
are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa
from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from siirl_dask.errors import counted
from siirl_dask.observe import printable
from siirl_dask.runs.samples.prompt_images import PICTURES
from siirl_dask.runs.samples.utterances import UtteranceKind
from siirl_dask.views.samples.answer import (
    AnswerLayout,
    QueryResult,
    cell,
    conversation,
    headings,
    lineage,
    reward_parts,
    speaker,
    summary,
)

_ROWS = 40  # of a table; the rest is left out in its middle
_CHANGES = 3  # prompts shown of those that two steps share
_WIDEST = 1000  # characters of a table's line
_CELL = 60  # characters of a value in a table
_LABEL = 10
_LINES = 12  # of a sample's texts, in a pipe
_EVERY_LINE = 3 * 10**6
_FEWEST = 6  # of a sample's texts, in a terminal that is too low for all samples
_AROUND = 6  # lines of a sample beside its texts
_BAR = 30
_UTTERANCES = 24  # of a conversation
_STYLES = {
    UtteranceKind.SAID: "bold blue",
    UtteranceKind.CALL: "bold magenta",
    UtteranceKind.ANSWER: "bold",
    UtteranceKind.RESULT: "bold green",
    UtteranceKind.SEGMENT: "bold yellow",
    UtteranceKind.FAILURE: "bold red",
}


def print_answer(console: Console, answer: QueryResult, *, full: bool = False) -> None:
    """Print one answer under its title; with ``full`` nothing of a text is left out."""
    console.print(Text(f"\n{printable(answer.title)}", style="bold"), soft_wrap=True)
    match answer.layout:
        case AnswerLayout.TABLE | AnswerLayout.HISTOGRAM:
            _print_table(console, answer.table, bars=answer.layout is AnswerLayout.HISTOGRAM)
        case AnswerLayout.SAMPLES:
            _print_samples(console, answer.table.to_pylist(), full=full)
        case AnswerLayout.CHANGES:
            _print_changes(console, answer.table.to_pylist(), full=full)
    if answer.note:
        console.print(Text(answer.note, style="dim"))


def _print_table(console: Console, data: pa.Table, *, bars: bool) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for field in data.schema:
        side: Literal["left", "right"] = "left"
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            side = "right"
        table.add_column(Text(printable(field.name)), justify=side, no_wrap=True)
    head, tail = _ends(data.num_rows)
    rows = [*data.slice(0, head).to_pylist(), *data.slice(data.num_rows - tail).to_pylist()]
    if bars:
        table.add_column("")
    most = 0
    if bars:
        most = max((row["samples"] for row in rows), default=0)
    for number, row in enumerate(rows):
        if number == head and tail:
            table.add_row(Text(f"... {data.num_rows - head - tail} more", style="dim"))
        cells = [Text(cell(name, value)[:_CELL]) for name, value in row.items()]
        if bars:
            cells.append(Text("█" * round(_BAR * row["samples"] / most)))
        table.add_row(*cells)
    needed = console.measure(table, options=console.options.update(width=_WIDEST)).maximum
    width = console.width
    console.width = max(width, needed)  # rich would cut numbers
    console.print(table)
    console.width = width


def _ends(rows: int) -> tuple[int, int]:
    """Return how many rows of a table are shown from its beginning and from its end."""
    if rows <= _ROWS:
        return (rows, 0)
    return (_ROWS // 2, _ROWS // 2)


def _print_samples(console: Console, samples: Sequence[Mapping[str, Any]], *, full: bool) -> None:
    lines = _EVERY_LINE if full else _lines_each(console, len(samples))
    for number, sample in enumerate(samples, start=1):
        console.print(
            Rule(Text(f"{number} of {len(samples)}: {headings(sample)}"), align="left", style="dim")
        )
        answer = 2
        if full:
            answer = _EVERY_LINE
        texts = {"prompt": lines // 3, "response": lines - lines // 3, "answer": answer}
        said = conversation(sample)
        rows = {"images": Text(pictures_in_words(sample))}
        rows |= {
            name: _cut(console, sample[name], most)
            for name, most in texts.items()
            if name in sample
        }
        if said:
            rows["response"] = _conversation(console, said, lines)
        rows |= {"parts": Text(reward_parts(sample)), "from": Text(lineage(sample), style="dim")}
        console.print(_grid(rows))


def _conversation(console: Console, said: Sequence[Mapping[str, Any]], lines: int) -> Text:
    """Return who said what, each on some of so many lines, those in the middle left out where
    they are too few.
    """
    each = max(2, lines // len(said) - 1)
    head = len(said)
    tail = 0
    if len(said) > _UTTERANCES:
        tail = _UTTERANCES // 3
        head = _UTTERANCES - tail
    parts = []
    for number, one in enumerate(said):
        if head <= number < len(said) - tail:
            parts += [Text(f"... {len(said) - head - tail} more ...", style="dim")] * (
                number == head
            )
            continue
        text = _cut(console, one["text"], each)
        parts.append(Text(speaker(one), style=_STYLES[one["kind"]]))
        if text:
            parts.append(text)
    return Text("\n").join(parts)


def _print_changes(console: Console, changes: Sequence[Mapping[str, Any]], *, full: bool) -> None:
    console.print(Text(summary(changes)))
    shown = changes[:_CHANGES]
    lines = _EVERY_LINE if full else _lines_each(console, len(shown))
    for row in shown:
        said = f"{cell('reward', row['then'])} then, {cell('reward', row['now'])} now"
        console.print(Rule(Text(said), align="left", style="dim"))
        texts = {
            "prompt": "prompt",
            "answer": "answer",
            "then": "then_response",
            "now": "now_response",
        }
        cells = {label: _cut(console, row[name], lines // 3) for label, name in texts.items()}
        console.print(_grid({"images": Text(pictures_in_words(row)), **cells}))
    if len(changes) > len(shown):
        console.print(
            Text(f"... {len(changes) - len(shown)} more prompts; --html shows them", style="dim")
        )


def _lines_each(console: Console, samples: int) -> int:
    """Return how many lines the texts of each sample may take."""
    if console.is_terminal:
        return max(_FEWEST, console.height // samples - _AROUND)
    return _LINES


def _grid(rows: Mapping[str, Text]) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=_LABEL, style="dim")
    grid.add_column(overflow="fold")
    for label, text in rows.items():
        if text:
            grid.add_row(label, text)
    return grid


def _cut(console: Console, value: object, most: int) -> Text:
    """Return a text, wrapped, with its beginning and end if it has more than ``most`` lines."""
    text = printable("" if value is None else str(value)).strip()
    width = max(20, console.width - _LABEL - 2)
    most = max(2, most)
    room = most * width  # characters that can be shown at all
    head = Text(text[:room]).wrap(console, width, overflow="fold")
    # the line that says what is left out has to save more than one
    if len(text) <= room and len(head) <= most + 1:
        return Text("\n").join(head)
    tail = Text(text[-room:]).wrap(console, width, overflow="fold")
    first = list(head[: most - most // 3])
    last = list(tail[len(tail) - most // 3 :])
    left_out = max(0, len(text) - sum(len(line.plain) for line in (*first, *last)))
    return Text("\n").join(
        [*first, Text(f"... {left_out:,} characters left out ...", style="dim"), *last]
    )


def pictures_in_words(sample: Mapping[str, Any]) -> str:
    """Return ``[2 images: 640x480 JPEG, 16x24 PNG]``, and in a line each what cannot be shown;
    empty without images.
    """
    pictures = sample.get(PICTURES)
    if not pictures:
        return ""
    kinds = [one["kind"] for one in pictures if one["problem"] is None]
    problems = [
        " ".join(printable(one["problem"]).split())
        for one in pictures
        if one["problem"] is not None
    ]
    shown = []
    if kinds:
        shown = [f"{counted(len(kinds), 'image')}: {', '.join(kinds)}"]
    return "\n".join(f"[{line}]" for line in (*shown, *problems))
