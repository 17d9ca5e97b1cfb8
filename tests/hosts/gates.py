"""Nodes that note what they generate, and that wait while a test does something to a host."""

import time
from dataclasses import replace
from pathlib import Path

from siirl_dask import columns
from siirl_dask.config import RolloutConfig
from siirl_dask.nodes import generate


def wait_while_there(gate):
    """Wait as long as there is such a file, and say that somebody does."""
    while gate.exists():
        gate.with_name(f"at-{gate.name}").touch()
        time.sleep(0.02)


def generate_and_note(ctx, table, *, rollout: RolloutConfig, notes):
    """Wait at the gate of this step, if there is one, then note that it is generated."""
    wait_while_there(Path(notes, f"generate-{ctx.step}"))
    with Path(notes, "generated").open(
        "a"
    ) as file:  # outside of the host, which may be switched off
        file.write(f"{ctx.step}\n")
    return generate(ctx, table, rollout=rollout)


generate_and_note.__contract__ = replace(generate.__contract__, depends_on_options=None)


@columns()
def wait_before_update(ctx, table, *, notes):
    wait_while_there(Path(notes, f"update-{ctx.step}"))
    return table
