"""Tells what a replay changed, as text for a terminal."""

from __future__ import annotations

import textwrap

from siirl_dask.commands.replay import Replayed
from siirl_dask.errors import counted
from siirl_dask.observe import printable

_WIDTH = 100  # letters of a prompt or a response


def render(replayed: Replayed) -> str:
    """Return which rows were run again with which weights, and what that changed."""
    changes = replayed.changes
    first, last = changes.steps
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [f"{counted(changes.rows, 'row')} of {steps}, in table {changes.table!r}", *replayed.weights, ""]
    lines.append(
        f"{'column':<20} {'values':>9} {'changed':>9} {'flipped':>9} {'before':>10} {'after':>10} {'corr.':>7}"
    )
    for column in changes.columns:
        correlation = "-" if column.correlation is None else f"{column.correlation:.3f}"
        lines.append(
            f"{column.name:<20} {column.values:>9} {column.changed:>9} {column.flipped:>9} {column.before:>10.4g} "
            f"{column.after:>10.4g} {correlation:>7}"
        )
    for sample in changes.samples:
        lines += [
            "",
            f"step {sample.step}, row {sample.row}: reward {_number(sample.before)} -> {_number(sample.after)}",
        ]
        lines += [f"  prompt    {_shown(sample.prompt)}", f"  response  {_shown(sample.response)}"]
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _shown(text: str) -> str:
    """Return a text on one line, cut to what a terminal shows."""
    return textwrap.shorten(printable(text), _WIDTH, placeholder=" ...") or "(nothing)"
