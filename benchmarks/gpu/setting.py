"""The model and rows of all figures and of TRL: the shape of Qwen2.5-0.5B with random weights,
tiny in a rehearsal.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from siirl_dask.tasks.tiny_model import tiny_model
from tests.gpu import devices

WORK = Path("build/gpu-work")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Sizes of the model and of a step."""

    rows: int
    prompt: int
    """Tokens of each prompt."""
    response: int
    """Tokens of each response."""
    micro_rows: int
    """Padded rows of a micro-batch, in plain transformers and in TRL."""
    decoded: tuple[tuple[int, int], ...]
    """(rows, new tokens) of each measurement of the engine."""
    sampled: tuple[int, int]
    """(rows, vocabulary) of the sampler's logits."""
    square: int
    """Rows and columns of the matrices of the ceiling of arithmetic."""
    copied: int
    """Float32 numbers of the copy that is the ceiling of the memory's rate."""
    shape: Mapping[str, int] = field(default_factory=dict)
    """Arguments of ``tiny_model``."""


GPU = Setting(
    rows=64,
    prompt=128,
    response=384,
    micro_rows=16,
    decoded=((16, 128), (64, 128), (256, 128)),
    sampled=(256, 151_936),
    square=8192,
    copied=2**30,
    shape={
        "hidden": 896,
        "layers": 24,
        "heads": 14,
        "kv_heads": 2,
        "head_dim": 64,
        "intermediate": 4864,
        "vocabulary": 151_936,
    },
)
REHEARSAL = Setting(
    rows=4,
    prompt=16,
    response=8,
    micro_rows=2,
    decoded=((2, 4), (4, 8)),
    sampled=(4, 8192),
    square=512,
    copied=2**20,
)


def setting() -> Setting:
    """The setting of this process's device."""
    return REHEARSAL if devices.ON_CPU else GPU


def model_folder() -> Path:
    """The folder of the model, written by the first process that asks for it."""
    folder = WORK / ("tiny-model" if devices.ON_CPU else "model")
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        tiny_model(unfinished, seed=1, family="qwen2", **setting().shape)
        unfinished.rename(folder)
    return folder


def median_seconds(work: Callable[[], object], times: int = 3) -> float:
    """Median of some repetitions, after one that warms up; the device has finished each."""
    work()
    devices.finish()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        devices.finish()
        seconds.append(time.perf_counter() - began)
    return sorted(seconds)[len(seconds) // 2]
