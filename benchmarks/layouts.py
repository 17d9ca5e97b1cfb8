"""Memory of a rank, bytes between ranks and seconds of an update: fsdp and megatron, in several layouts.

    python benchmarks/layouts.py [--rows 16] [--tokens 128] [--out PAGE.md]

A model of 26 million parameters learns from the same rows in float32, on ranks with a torch thread each that share
nothing but a loopback device of their own (a network namespace), whose counter tells the bytes of all of them. A rank's
memory is the most that its process has had during an update, above what it had before it built its policy. Before a
layout counts, its loss must be that of a single process, within 1e-5.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from generation import endless_model
from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Backend, MegatronConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.rows import random_rows, signs
from siirl_dask.training import TrainBatch, build_trainer

_SHAPE = {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "head_dim": 64, "intermediate": 1536}
_UPDATES = 4  # of which the first is not counted: it makes the optimizer's moments
_APART = "SIIRL_LAYOUTS_APART"  # set in the process that has a network of its own


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    ranks: int
    backend: Backend = Backend.megatron
    tensor: int = 1
    pipeline: int = 1
    tokens: bool = False
    """Whether ranks that split a layer split its tokens as well."""

    @property
    def config(self) -> TrainerConfig:
        megatron = MegatronConfig(
            tensor_parallel=self.tensor, pipeline_parallel=self.pipeline, sequence_parallel=self.tokens
        )
        return TrainerConfig(backend=self.backend, megatron=megatron, lr=1e-4, max_tokens_per_micro_batch=1024)


LAYOUTS = (
    Layout("one process", 1, Backend.torch),
    Layout("fsdp", 2, Backend.fsdp),
    Layout("replicas", 2),
    Layout("tensor 2", 2, tensor=2),
    Layout("tensor 2, tokens split", 2, tensor=2, tokens=True),
    Layout("stages 2", 2, pipeline=2),
    Layout("fsdp", 4, Backend.fsdp),
    Layout("tensor 4", 4, tensor=4),
    Layout("tensor 2, stages 2", 4, tensor=2, pipeline=2),
    Layout("stages 4", 4, pipeline=4),
    Layout("tensor 2, two replicas", 4, tensor=2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of a row's response; its prompt has 16")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if _APART not in os.environ:
        apart = ["unshare", "--net", "--map-root-user", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
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
            seen = run_ranks(layout.ranks, partial(measure, str(model), layout, given.rows, given.tokens), exchange)
            alone = alone or seen[0]["loss"]
            if abs(seen[0]["loss"] - alone) > 1e-5:
                sys.exit(f"{layout.name} on {layout.ranks} ranks: loss {seen[0]['loss']} where it is {alone}")
            lines.append(line_of(layout, seen))
            print(lines[-1], file=sys.stderr, flush=True)
    text = report(parameters, given.rows, given.tokens, lines)
    print(text)
    if given.out:
        given.out.write_text(text)


def measure(model: str, layout: Layout, rows: int, tokens: int, rank: Rank) -> dict[str, Any]:
    """Take some updates, in one rank. Every rank returns its own memory, and what all have sent."""
    before = resident()
    trainer = build_trainer(
        Device(f"w{rank.rank}"), rank, model=ModelConfig(path=model), trainer=layout.config, rollout=RolloutConfig()
    )
    lengths = [(16, tokens)] * rows
    own = random_rows(lengths, range(rank.rank * rows // rank.size, (rank.rank + 1) * rows // rank.size))
    logprobs = trainer.logprobs(own).logprobs
    batch = TrainBatch(rows=own, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(own))
    moved, seconds = [], []
    loss = 0.0
    for _ in range(_UPDATES):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this update
        dist.barrier(rank.side_group)
        sent, began = loopback(), time.perf_counter()
        loss = trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))["loss"]
        dist.barrier(rank.side_group)
        moved.append(loopback() - sent)
        seconds.append(time.perf_counter() - began)
    return {"loss": float(loss), "peak": peak() - before, "moved": median(moved[1:]), "seconds": median(seconds[1:])}


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return status("VmRSS")


def peak() -> int:
    """Return the most bytes of memory that this process has had since the peak was reset."""
    return status("VmHWM")


def status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def loopback() -> int:
    """Return the bytes that have been sent over the loopback device."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def line_of(layout: Layout, seen: Sequence[dict[str, Any]]) -> str:
    memory = max(one["peak"] for one in seen) / 2**20
    sent = seen[0]["moved"] / layout.ranks / 1e6
    about = f"{layout.ranks} | {layout.backend} | {layout.name}"
    return f"| {about} | {memory:,.0f} | {sent:,.1f} | {seen[0]['seconds']:.2f} |"


def report(parameters: int, rows: int, tokens: int, lines: Sequence[str]) -> str:
    return "\n".join(
        [
            "# Layouts of a trainer",
            "",
            f"`python benchmarks/layouts.py --rows {rows} --tokens {tokens}` on {date.today():%d %B %Y}, "
            f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end; torch "
            f"{torch.__version__}.",
            "",
            *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(),
            "",
            f"{parameters / 1e6:.1f} million parameters; an update of {rows} rows of 16 + {tokens} tokens.",
            "",
            "| ranks | backend | layout | MiB of the largest rank | MB that a rank sends | seconds of an update |",
            "|---|---|---|---:|---:|---:|",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
