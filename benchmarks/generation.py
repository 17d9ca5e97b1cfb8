"""Shared by the benchmarks of generation: a random model that no token ends, lengths with a long
tail, and a run's overrides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from siirl_dask.models.broken_imports import hide

MEDIAN, SIGMA, LONGEST = 32, 1.0, 256
"""Median, sigma and cut-off of the log-normal distribution of lengths."""


def long_tailed(rows: int, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(np.log(MEDIAN), SIGMA, rows)
    return [int(length) for length in np.clip(lengths, 1, LONGEST)]


def endless_model(folder: Path, **sizes: int) -> tuple[str, int]:
    """A model of ``sizes`` (see ``tiny_model``) whose responses end at their limit, and how many
    parameters it has.
    """
    hide()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from siirl_dask.tasks.tiny_model import tiny_model

    path = tiny_model(folder, **sizes)  # type: ignore[arg-type]  # sizes are whole numbers
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(path)
    GenerationConfig().save_pretrained(path)
    return str(path), sum(
        tensor.numel() for tensor in AutoModelForCausalLM.from_pretrained(path).parameters()
    )


def two_workers(url: str, values: Mapping[str, object]) -> list[str]:
    """Overrides of the quickstart for a run at ``url`` of two workers that do everything, with data
    and a model that ``values`` name: it trains or generates, and does nothing besides.
    """
    bare = {
        "run.url": url,
        "data.prepare": "null",
        "cluster.workers": 2,
        "cluster.placement": "{}",
        "checkpoint.every": 0,
        "validation.url": "null",
        "validation.test_url": "null",
        "observe.progress": "false",
    }
    return [f"{key}={value}" for key, value in {**bare, **values}.items()]
