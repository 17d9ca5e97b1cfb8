"""Memory of a rank, bytes between ranks and seconds of an update: fsdp and megatron, in several
layouts.

    python benchmarks/layouts.py [--rows 16] [--tokens 128] [--out PAGE.md]

A model of 25 million parameters learns from the same rows in float32, on ranks with a torch thread
each that share nothing but a loopback device of their own (a network namespace), whose counter
tells the bytes of all of them. A rank's memory is the most that its process has had during an
update, above what it had before it built its policy. Before a layout counts, the loss of its first
update must be that of a single process, within 1e-5.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from generation import endless_model
from layout_rank import Layout, measure
from sections import replace_section
from siirl_dask.config import Backend
from siirl_dask.models.broken_imports import hide
from siirl_dask.testing.ranks import run_ranks

_SHAPE = {
    "hidden": 512,
    "layers": 8,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 1536,
}
_APART = "SIIRL_LAYOUTS_APART"  # set in the process that has a network of its own
LAYOUTS = (
    Layout("one process", 1, Backend.torch),
    Layout("fsdp", 2, Backend.fsdp),
    Layout("replicas", 2),
    Layout("replicas, state divided", 2, divided=True),
    Layout("tensor 2", 2, tensor=2),
    Layout("tensor 2, tokens split", 2, tensor=2, tokens=True),
    Layout("stages 2", 2, pipeline=2),
    Layout("stages 2, two runs of layers", 2, pipeline=2, chunks=2),
    Layout("context 2", 2, context=2),
    Layout("fsdp", 4, Backend.fsdp),
    Layout("tensor 4", 4, tensor=4),
    Layout("tensor 2, stages 2", 4, tensor=2, pipeline=2),
    Layout("stages 4", 4, pipeline=4),
    Layout("context 4", 4, context=4),
    Layout("tensor 2, context 2", 4, tensor=2, context=2),
    Layout("tensor 2, two replicas", 4, tensor=2),
    Layout("tensor 2, two replicas, state divided", 4, tensor=2, divided=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=128, help="of a row's response; its prompt has 16"
    )
    parser.add_argument("--out", type=Path, help="page whose section is replaced")
    given = parser.parse_args()
    if _APART not in os.environ:
        apart = [
            "unshare",
            "--net",
            "--map-root-user",
            "sh",
            "-c",
            'ip link set lo up && exec "$@"',
            "sh",
        ]
        command = [*apart, sys.executable, *sys.argv]
        sys.exit(subprocess.run(command, env={**os.environ, _APART: "1"}, check=False).returncode)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    hide()
    with TemporaryDirectory() as folder:
        model, parameters = endless_model(Path(folder, "model"), **_SHAPE)
        lines, alone = [], None
        for number, layout in enumerate(LAYOUTS):
            exchange = Path(folder, f"ranks-{number}")
            exchange.mkdir()
            seen = run_ranks(
                layout.ranks,
                partial(measure, str(model), layout, given.rows, given.tokens),
                exchange,
            )
            alone = alone or seen[0]["loss"]
            if abs(seen[0]["loss"] - alone) > 1e-5:
                sys.exit(
                    f"{layout.name} on {layout.ranks} ranks: loss {seen[0]['loss']} where it is "
                    f"{alone}"
                )
            lines.append(line_of(layout, seen))
            print(lines[-1], file=sys.stderr, flush=True)
    text = report(parameters, given.rows, given.tokens, lines)
    print(text)
    if given.out:
        replace_section(given.out, text)


def line_of(layout: Layout, seen: Sequence[dict[str, Any]]) -> str:
    memory = max(one["peak"] for one in seen) / 2**20
    sent = seen[0]["moved"] / layout.ranks / 1e6
    about = f"{layout.ranks} | {layout.backend} | {layout.name}"
    return f"| {about} | {memory:,.0f} | {sent:,.1f} | {seen[0]['seconds']:.2f} |"


def report(parameters: int, rows: int, tokens: int, lines: Sequence[str]) -> str:
    return "\n".join(
        [
            "## Memory, bytes and seconds",
            "",
            f"`python benchmarks/layouts.py --rows {rows} --tokens {tokens}` on "
            f"{date.today():%d %B %Y}, {platform.machine()}, {os.cpu_count()} cores, load "
            f"{os.getloadavg()[0]:.1f} at the end; torch {torch.__version__}. "
            f"{parameters / 1e6:.1f} million parameters; an update of {rows} rows of 16 + {tokens} "
            "tokens.",
            "",
            "| ranks | backend | layout | MiB of the largest rank | MB that a rank sends | seconds "
            "of an update |",
            "|---|---|---|---:|---:|---:|",
            *lines,
        ]
    )


if __name__ == "__main__":
    main()
