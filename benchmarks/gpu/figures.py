"""Measures one part of the figures, alone on the device, in a process of its own.  python
figures.py OUT NAME

A process for each keeps peaks of memory apart, and an error of the device in one part from the
next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from siirl_dask.models.broken_imports import hide

hide()  # packages that fit no torch here would end the import of transformers

import results  # noqa: E402
from generation_figures import ceilings, decode, sampler  # noqa: E402
from siirl_dask.config import Backend, TrainerConfig  # noqa: E402
from tests.gpu import devices  # noqa: E402
from training_figures import plain, train  # noqa: E402

TOKENS = 16384  # of a micro-batch


def config(**options: object) -> TrainerConfig:
    """A trainer's configuration, as all figures have it but for the options."""
    return TrainerConfig(lr=1e-6, **options)


def train_torch(out: Path) -> None:
    """Measure the backend torch."""
    train(
        out,
        "train-torch",
        config(backend=Backend.torch, max_tokens_per_micro_batch=TOKENS),
        "torch",
        profiled=True,
    )


def train_fsdp(out: Path) -> None:
    """Measure the backend fsdp on one device."""
    train(
        out,
        "train-fsdp",
        config(backend=Backend.fsdp, max_tokens_per_micro_batch=TOKENS),
        "fsdp",
        profiled=True,
    )


def train_variants(out: Path) -> None:
    """Measure smaller micro-batches, recomputation, and Liger's kernels where there is a GPU for
    them.
    """
    part = "train-variants"
    train(out, part, config(max_tokens_per_micro_batch=TOKENS // 4), "torch, 4k tokens")
    recomputing = config(max_tokens_per_micro_batch=TOKENS, gradient_checkpointing=True)
    train(out, part, recomputing, "torch, recomputation")
    if devices.ON_CPU:
        results.append(
            out, part=part, figure="train/torch, liger", left_out="Liger's kernels need a GPU"
        )
        return
    train(out, part, config(max_tokens_per_micro_batch=TOKENS, liger=True), "torch, liger")


MEASURE: Mapping[str, Callable[[Path], None]] = {
    "ceilings": ceilings,
    "decode": decode,
    "train-torch": train_torch,
    "train-fsdp": train_fsdp,
    "sampler": sampler,
    "plain": plain,
    "train-variants": train_variants,
}


if __name__ == "__main__":
    MEASURE[sys.argv[2]](Path(sys.argv[1]))
