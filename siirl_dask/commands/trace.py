"""``siirl-dask trace``: says where the time of a run goes and who is slow, and writes a trace
that Perfetto opens.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from siirl_dask.commands.options.steps import one_step, steps_between
from siirl_dask.commands.program.outputs import write_output
from siirl_dask.errors import counted
from siirl_dask.observe import PipeConsole, printable
from siirl_dask.observe.trace.bottleneck import (
    Bottleneck,
    NodeTime,
    WorkerTime,
    find_bottleneck,
    longest_wait,
    moving_share,
)
from siirl_dask.observe.trace.chrome_trace import chrome_trace
from siirl_dask.runs.reader import open_run
from siirl_dask.runs.trace import RECENT_STEPS, Trace, read_recent, read_trace
from siirl_dask.trace import Lane
from siirl_dask.views.table_width import table_width

_NODES = 8  # rows of a table
_WORKERS = 40  # rows of a table
_TIMES = "times the others"
_RECEIVED = "received a step"
_MOST = "waits most"
_OF_NODES = ("node", "slowest on", "seconds a step", "share", _TIMES)
_OF_WORKERS = ("worker", "computes", "moves", "waits", "other", _RECEIVED, _MOST)
_SPARED = ("other", _RECEIVED, _TIMES)
"""Headings of columns that narrow terminals go without, in this order."""
_TOLD = 0.01  # share of the time; how workers differ in less is chance
_EVEN = 1.1  # times the others' median: what is less is no news


def add_trace(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument(
        "--step",
        type=one_step,
        dest="steps",
        metavar="N",
        help="of this step alone",
    )
    command.add_argument(
        "--steps",
        type=steps_between,
        metavar="A:B",
        help=f"of steps A to B; default: the newest {RECENT_STEPS}",
    )
    command.add_argument(
        "-o", "--output", metavar="FILE", help="write a trace for ui.perfetto.dev, at a path or URL"
    )


def show_trace(chosen: Namespace) -> None:
    """Print where the time went, and write the file. ConfigError without a run, DataError
    without a trace.
    """
    open_run(chosen.run)
    steps = chosen.steps
    trace = read_recent(chosen.run) if steps is None else read_trace(chosen.run, steps)
    console = PipeConsole()
    print_bottleneck(console, trace, find_bottleneck(trace.spans))
    if chosen.output:
        _write(chosen.output, trace, chosen.run)
        console.print(
            Text(f"{chosen.output} has the trace: open it in https://ui.perfetto.dev"),
            soft_wrap=True,
        )


def print_bottleneck(console: Console, trace: Trace, found: Bottleneck) -> None:
    """Print the slowest node and worker, and a table each of nodes and workers."""
    for line in _lines(trace, found):
        console.print(Text(printable(line)), soft_wrap=True)
    _print_table(console, _OF_NODES, _node_rows(found))
    _print_table(console, _OF_WORKERS, _worker_rows(found))
    if len(found.workers) > _WORKERS:
        console.print(Text(f"... {len(found.workers) - _WORKERS} more workers", style="dim"))
    if found.dropped:
        console.print(
            Text(f"{found.dropped} of the oldest spans were too many to be kept", style="dim")
        )


def _lines(trace: Trace, found: Bottleneck) -> list[str]:
    first = trace.steps[0]
    last = trace.steps[-1]
    steps = f"steps {first} to {last}"
    if first == last:
        steps = f"step {first}"
    left = ""
    if len(trace.steps) != len(trace.all_steps):
        left = f" of {trace.all_steps[0]} to {trace.all_steps[-1]}"
    each = found.seconds / found.steps
    lines = [
        f"{steps}{left}: {found.seconds:.2f} s, {each:.2f} s a step, "
        f"{counted(len(found.workers), 'worker')}"
    ]
    start = found.start
    if start and start.seconds > each:
        lines.append(
            f"start     {start.node} on worker {start.worker!r} took longest, {start.seconds:.1f} s"
        )
    slowest = found.slowest
    if slowest:
        lines.append(f"slowest   {_told(slowest, found)}")
    uneven = found.uneven
    if uneven and uneven.times_others and uneven.times_others > _EVEN:
        lines.append(
            f"uneven    node {uneven.node!r} takes {uneven.times_others:.1f} times as long on "
            f"worker {uneven.worker!r} "
            f"as on the others: {uneven.seconds * (1 - 1 / uneven.times_others):.2f} s a step"
        )
    return lines


def _told(one: NodeTime, found: Bottleneck) -> str:
    return (
        f"node {one.node!r} on worker {one.worker!r}: {one.seconds:.2f} s a step, {one.share:.0%} "
        "of the time"
    )


def _node_rows(found: Bottleneck) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in found.nodes[:_NODES]:
        times = "" if one.times_others is None or one.share < _TOLD else f"{one.times_others:.2f}"
        rows.append(
            (
                printable(one.node),
                printable(one.worker),
                f"{one.seconds:.3f}",
                f"{one.share:.0%}",
                times,
            )
        )
    return rows


def _worker_rows(found: Bottleneck) -> list[tuple[str, ...]]:
    rows = []
    for worker in found.workers[:_WORKERS]:
        shares = (
            worker.share([Lane.COMPUTE]),
            moving_share(worker),
            worker.share([Lane.WAIT]),
            1 - worker.explained,
        )
        received = f"{worker.received / found.steps / 1e6:,.2f} MB"
        percents = (f"{share:.1%}" for share in shares)
        rows.append((printable(worker.worker), *percents, received, _waits(worker)))
    return rows


def _waits(worker: WorkerTime) -> str:
    longest = longest_wait(worker)
    if longest is None:
        return ""
    name, cause, share = longest
    whom = ""
    if cause:
        whom = f" for worker {cause!r}"
    return printable(f"{share:.0%} at {name}{whom}")


def _print_table(
    console: Console, headings: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> None:
    """Print a table; where a terminal is too narrow, without the columns that say least. What is
    wider all the same is printed whole: rich would cut numbers.
    """
    columns = {
        heading: [row[place] for row in (headings, *rows)] for place, heading in enumerate(headings)
    }
    if console.is_terminal and _MOST in columns:  # it goes on in the next line
        columns[_MOST] = [word for text in columns[_MOST] for word in text.split()]
    for heading in _SPARED:
        if console.is_terminal and table_width([*columns.values()]) > console.width:
            columns.pop(heading, None)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns:
        left = heading in (headings[0], "slowest on", _MOST)
        table.add_column(
            heading,
            justify="left" if left else "right",
            no_wrap=heading != _MOST or not console.is_terminal,
        )
    for row in rows:
        table.add_row(*[row[place] for place, heading in enumerate(headings) if heading in columns])
    width = console.width
    console.width = max(width, table_width([*columns.values()]))
    console.print(table)
    console.width = width


def _write(to: str, trace: Trace, run: str) -> None:
    text = json.dumps(chrome_trace(trace.spans, run), separators=(",", ":"), allow_nan=False)
    write_output(to, text.encode(), option="-o", what="trace")
