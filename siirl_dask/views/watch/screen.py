"""A run at one moment, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from siirl_dask.errors import counted
from siirl_dask.observe import Status, printable, time_left
from siirl_dask.runs.samples.utterances import FAILED
from siirl_dask.schema import FINISH_REASON, TURNS
from siirl_dask.views.charts.figures import duration, number
from siirl_dask.views.charts.headlines import headlines_of, is_shown
from siirl_dask.views.charts.series import series_of
from siirl_dask.views.charts.sparkline import sparkline
from siirl_dask.views.table_width import GAP, table_width
from siirl_dask.views.watch.look import Life, Look
from siirl_dask.wording import redacted

_CURVE = (10, 60)  # characters of a curve
_TEXT = 60  # characters of a prompt or a response
_ERROR = 600
_COLOURS = {Status.COMPLETE: "green", Status.FAILED: "red", Status.INTERRUPTED: "yellow"}


def screen(look: Look, width: int) -> RenderableType:
    """Return what is shown of the run in so many columns."""
    parts: list[RenderableType] = [_head(look), *_remarks(look)]
    if look.records:
        parts.append(_curves(look, width))
    if look.slowest:
        slow = look.slowest
        parts.append(
            Text(
                f"slowest  node {printable(slow.node)!r} on worker {printable(slow.worker)!r}, "
                f"{slow.share:.0%} of {_steps_in_words(look.traced_steps)}",
                style="bold",
            )
        )
    if look.samples:
        parts += [Text(f"\nsome samples of step {look.samples_step}", style="bold"), _samples(look)]
    return Group(*parts)


def _steps_in_words(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"steps {steps[0]} to {steps[-1]}"


def _head(look: Look) -> Text:
    life, colour = _status(look)
    of = ""
    if look.total is not None:
        of = f" of {look.total:,}"
    text = Text.assemble(
        (printable(look.name), "bold"), "  ", (life, colour), f"  step {look.done:,}{of}"
    )
    if not look.life.is_over and look.seconds_left is not None:
        text.append(f"  {time_left(look.seconds_left)}, without validations", style="cyan")
    if look.summary and look.life is Life.ENDED:
        text.append(
            f"  in {duration(look.summary.seconds)} on {counted(look.summary.workers, 'worker')}"
        )
    text.append(f"\n{printable(redacted(look.url))}", style="dim")
    if look.start:
        text.append(
            f"   start {look.start.number}, {printable(str(look.start.owner))}", style="dim"
        )
    return text


def _status(look: Look) -> tuple[str, str]:
    if look.life is Life.ENDED and look.summary:
        return str(look.summary.status), _COLOURS[look.summary.status]
    words = {
        Life.UNDER_WAY: ("under way", "cyan"),
        Life.UNKNOWN: ("has not said that it ended", "yellow"),
        Life.GONE: ("gone: it was killed, or is cut off from its store", "red"),
    }
    return words.get(look.life, ("ended", ""))


def _remarks(look: Look) -> Iterator[Text]:
    if look.summary and look.life is Life.ENDED:
        if look.summary.error:
            yield Text(
                printable(redacted(look.summary.error))[:_ERROR],
                style=_COLOURS[look.summary.status],
            )
        if look.summary.restarts:
            last = look.summary.restarts[-1]
            yield Text(
                f"went on by itself {counted(len(look.summary.restarts), 'time')}, last after step "
                f"{last.steps}",
                style="yellow",
            )
    if look.life is Life.GONE:
        yield Text("the command that started it resumes it", style="yellow")
    if look.trouble:
        yield Text(printable(look.trouble)[:_ERROR], style="yellow")
    if not look.records:
        yield Text("no step is done yet", style="dim")


def _curves(look: Look, width: int) -> Table:
    """Return a line for each metric. Where there is no room for all columns, the curve goes, and
    then the least and the greatest value; no number is cut.
    """
    rows = []
    curves = []
    for (phase, name), title in headlines_of(look.records).items():
        series = series_of(look.records, phase, name)
        values = [value for _, value in series]
        if not values or not is_shown(name, values):
            continue
        numbers = (number(values[-1]), number(min(values)), number(max(values)))
        rows.append((title.partition(" (")[0], *numbers))
        curves.append(series)
    columns = [[row[place] for row in (("", "now", "from", "to"), *rows)] for place in range(4)]
    needed = table_width(columns)
    curve = min(width - needed - GAP, _CURVE[1])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("now", justify="right", no_wrap=True, min_width=max(map(len, columns[1])))
    if needed > width:
        for title, now, _, _ in rows:
            table.add_row(title, now)
        return table
    if curve >= _CURVE[0]:
        curve_of = "over the steps"
        if look.has_gap:
            curve_of = "first and newest steps"
        table.add_column(curve_of if len(curve_of) <= curve else "steps", no_wrap=True)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    for (title, now, low, high), series in zip(rows, curves, strict=True):
        drawn = []
        if curve >= _CURVE[0]:
            drawn = [sparkline(series, curve)]
        table.add_row(title, now, *[*drawn, low, high])
    return table


def _samples(look: Look) -> Table:
    table = Table.grid(padding=(0, 2))
    for sample in look.samples:
        prompt, response = (_short(sample[name]) for name in ("prompt", "response"))
        table.add_row(Text(_outcome(sample)), Text(prompt, style="dim"), Text(response))
    return table


def _outcome(sample: Mapping[str, Any]) -> str:
    """Return a sample's reward and, of a conversation, its turns."""
    turns = sample.get(TURNS)
    outcome = "failed"
    if sample.get(FINISH_REASON) != FAILED:
        outcome = f"reward {number(sample['reward'])}"
    if turns is None:
        return outcome
    return f"{outcome}, {counted(turns, 'turn')}"


def _short(value: object) -> str:
    text = " ".join(printable("" if value is None else str(value)).split())
    if len(text) <= _TEXT:
        return text
    return f"{text[: _TEXT - 1]}…"
