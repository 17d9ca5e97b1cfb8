"""``siirl-dask trace``: says where the time of a run goes and who is slow, and writes a trace
that Perfetto opens.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace

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
from siirl_dask.runs.trace import Trace, read_trace
from siirl_dask.trace import Lane

_NODES = 8  # rows of a table
_WORKERS = 40  # rows of a table
_WIDEST = 1000  # characters of a table's line
_TIMES = "times the others"
_RECEIVED = "received a step"
_MOST = "waits most"
_SPARED = ("other", _RECEIVED, _TIMES)
"""Headings of columns that narrow terminals go without, in this order."""
_TOLD = 0.01  # share of the time; how workers differ in less is chance
_EVEN = 1.1  # times the others' median: what is less is no news


def add_trace(command: ArgumentParser) -> None:
    """Add the arguments of the command."""
    command.add_argument("run", metavar="RUN", help="the run's folder or URL")
    command.add_argument(
        "--step", type=one_step, dest="steps", metavar="N", help="of this step alone"
    )
    command.add_argument(
        "--steps", type=steps_between, metavar="A:B", help="of steps A to B; default: the newest"
    )
    command.add_argument(
        "-o", "--output", metavar="FILE", help="write a trace for ui.perfetto.dev, at a path or URL"
    )


def show_trace(chosen: Namespace) -> None:
    """Print where the time went, and write the file. ConfigError without a run, DataError
    without a trace.
    """
    open_run(chosen.run)
    trace = read_trace(chosen.run, chosen.steps)
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
    _print_table(console, _node_table(found))
    _print_table(console, _worker_table(found))
    if len(found.workers) > _WORKERS:
        console.print(Text(f"... {len(found.workers) - _WORKERS} more workers", style="dim"))
    if found.dropped:
        console.print(
            Text(f"{found.dropped} of the oldest spans were too many to be kept", style="dim")
        )


def _lines(trace: Trace, found: Bottleneck) -> list[str]:
    first = trace.steps[0]
    last = trace.steps[-1]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    left = (
        ""
        if len(trace.steps) == len(trace.all_steps)
        else f" of {trace.all_steps[0]} to {trace.all_steps[-1]}"
    )
    each = found.seconds / found.steps
    lines = [
        f"{steps}{left}: {found.seconds:.2f} s, {each:.2f} s a step, "
        f"{counted(len(found.workers), 'worker')}"
    ]
    if (start := found.start) and start.seconds > each:
        lines.append(
            f"start     {start.node} on worker {start.worker!r} took longest, {start.seconds:.1f} s"
        )
    if slowest := found.slowest:
        lines.append(f"slowest   {_told(slowest, found)}")
    if (uneven := found.uneven) and uneven.times_others and uneven.times_others > _EVEN:
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


def _node_table(found: Bottleneck) -> Table:
    table = _table("node", "slowest on", "seconds a step", "share", _TIMES)
    for one in found.nodes[:_NODES]:
        times = "" if one.times_others is None or one.share < _TOLD else f"{one.times_others:.2f}"
        table.add_row(
            printable(one.node),
            printable(one.worker),
            f"{one.seconds:.3f}",
            f"{one.share:.0%}",
            times,
        )
    return table


def _worker_table(found: Bottleneck) -> Table:
    table = _table("worker", "computes", "moves", "waits", "other", _RECEIVED, _MOST)
    for worker in found.workers[:_WORKERS]:
        shares = (
            worker.share(Lane.COMPUTE),
            moving_share(worker),
            worker.share(Lane.WAIT),
            1 - worker.explained,
        )
        received = f"{worker.received / found.steps / 1e6:,.2f} MB"
        table.add_row(
            printable(worker.worker),
            *(f"{share:.1%}" for share in shares),
            received,
            _waits(worker),
        )
    return table


def _waits(worker: WorkerTime) -> str:
    if (longest := longest_wait(worker)) is None:
        return ""
    name, cause, share = longest
    whom = f" for worker {cause!r}" if cause else ""
    return printable(f"{share:.0%} at {name}{whom}")


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, heading in enumerate(headings):
        left = number == 0 or heading in ("slowest on", _MOST)
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != _MOST)
    return table


def _print_table(console: Console, table: Table) -> None:
    """Print a table; where a terminal is too narrow, without the columns that say least. What is
    wider all the same is printed whole: rich would cut numbers.
    """
    width = console.width
    if console.is_terminal:
        for heading in _SPARED:
            if _width(console, table, least=True) > width:
                table.columns = [each for each in table.columns if each.header != heading]
        console.width = max(width, _width(console, table, least=True))
    else:
        console.width = max(width, _width(console, table))
    console.print(table)
    console.width = width


def _width(console: Console, table: Table, *, least: bool = False) -> int:
    """Return the columns that a table takes, or with ``least`` those that it needs."""
    needed = console.measure(table, options=console.options.update(width=_WIDEST))
    return needed.minimum if least else needed.maximum


def _write(to: str, trace: Trace, run: str) -> None:
    text = json.dumps(chrome_trace(trace.spans, run), separators=(",", ":"), allow_nan=False)
    write_output(to, text.encode(), option="-o", what="trace")
