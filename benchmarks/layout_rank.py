"""One rank of benchmarks/layouts.py: takes updates in one layout of a trainer, and tells what
they took.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Backend, MegatronConfig, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.testing.rows import random_rows, signs
from siirl_dask.training import TrainBatch, build_trainer

_UPDATES = 4  # of which the first is not counted: it makes the optimizer's moments


@dataclass(frozen=True, slots=True)
class Layout:
    name: str
    ranks: int
    backend: Backend = Backend.megatron
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    chunks: int = 1
    """Runs of layers of a stage."""
    tokens: bool = False
    """Whether ranks that split a layer split its tokens as well."""
    divided: bool = False
    """Whether replicas divide the optimizer's state."""

    @property
    def config(self) -> TrainerConfig:
        megatron = MegatronConfig(
            tensor_parallel=self.tensor,
            pipeline_parallel=self.pipeline,
            context_parallel=self.context,
            virtual_pipeline=self.chunks,
            sequence_parallel=self.tokens,
            distributed_optimizer=self.divided,
        )
        return TrainerConfig(
            backend=self.backend, megatron=megatron, lr=1e-4, max_tokens_per_micro_batch=1024
        )


def measure(model: str, layout: Layout, rows: int, tokens: int, rank: Rank) -> dict[str, Any]:
    """Take some updates, in one rank. Every rank returns its own memory, and what all have sent."""
    before = resident()
    trainer = build_trainer(
        Device(f"w{rank.rank}"),
        rank,
        model=ModelConfig(path=model),
        trainer=layout.config,
        rollout=RolloutConfig(),
    )
    lengths = [(16, tokens)] * rows
    own = random_rows(
        lengths, range(rank.rank * rows // rank.size, (rank.rank + 1) * rows // rank.size)
    )
    logprobs = trainer.logprobs(own).logprobs
    batch = TrainBatch(
        rows=own, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(own)
    )
    losses, moved, seconds = [], [], []
    for _ in range(_UPDATES):
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of this update
        dist.barrier(rank.side_group)
        sent, began = loopback(), time.perf_counter()
        losses.append(
            trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))["loss"]
        )
        dist.barrier(rank.side_group)
        moved.append(loopback() - sent)
        seconds.append(time.perf_counter() - began)
    return {
        "loss": losses[0],
        "peak": peak() - before,
        "moved": median(moved[1:]),
        "seconds": median(seconds[1:]),
    }


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return status("VmRSS")


def peak() -> int:
    """Return the most bytes of memory that this process has had since the peak was reset."""
    return status("VmHWM")


def status(name: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    )
    return int(line.split()[1]) * 1024


def loopback() -> int:
    """Return the bytes that have been sent over the loopback device."""
    line = next(
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith("lo:")
    )
    return int(line.split()[9])
