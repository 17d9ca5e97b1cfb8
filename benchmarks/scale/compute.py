"""Measures an engine and a trainer in this process, in core seconds, and fits what they cost a
row and a token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch

from siirl_dask.algorithms import LossInputs, TokenLoss, ppo_clip
from siirl_dask.config import Engine, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.training import PackedRows, TrainBatch, build_trainer

from .lab_machine import EngineCost, TrainerCost, line_fit
from .pace import pace

_ROUNDS = 3
_ENGINE_CASES = ((2, 4, 16), (4, 16, 16), (8, 32, 16), (16, 8, 16), (16, 32, 16), (8, 8, 64))
"""Rows, response tokens, prompt tokens."""
_TRAINER_CASES = ((2, 24), (4, 40), (8, 32), (16, 40), (16, 24))
"""Rows, tokens of each."""
_PROMPT = 16


def measure_engine(model: Path) -> EngineCost:
    torch.set_num_threads(1)
    engine = build_engine(
        Device("0"),
        Rank(),
        model=ModelConfig(path=str(model)),
        rollout=RolloutConfig(engine=Engine.transformers),
    )
    seconds, columns = [], []
    for rows, length, prompt in _ENGINE_CASES:
        prompts = [[1 + (row + at) % 200 for at in range(prompt)] for row in range(rows)]
        sampling = Sampling(max_tokens=length)
        seconds.append(
            _core_seconds(partial(engine.generate, prompts, list(range(rows)), sampling))
        )
        columns.append([1.0, float(rows * prompt), float(length), float(rows * length)])
    return EngineCost(*line_fit(list(zip(*columns, strict=True)), seconds))


def measure_trainer(model: Path) -> TrainerCost:
    torch.set_num_threads(1)
    config = ModelConfig(path=str(model))
    trainer = build_trainer(
        Device("0"), Rank(), model=config, trainer=TrainerConfig(lr=1e-6), rollout=RolloutConfig()
    )
    passes, updates, columns = [], [], []
    for rows, length in _TRAINER_CASES:
        packed = _rows(rows, length)
        scores = trainer.logprobs(packed).logprobs
        advantages = 1.0 - 2.0 * (torch.arange(len(scores)) % 2)
        batch = TrainBatch(
            rows=packed, old_logprobs=scores, rollout_logprobs=scores, advantages=advantages
        )
        passes.append(_core_seconds(partial(trainer.logprobs, packed)))
        updates.append(_core_seconds(partial(trainer.update, [batch], _loss)))
        columns.append([1.0, float(rows * length)])
    both: list[tuple[float, ...]] = list(zip(*columns, strict=True))
    return TrainerCost(*line_fit(both, passes), *line_fit(both, updates))


def _loss(inputs: LossInputs) -> TokenLoss:
    return ppo_clip(inputs, clip_low=0.2, clip_high=0.2)


def _rows(rows: int, length: int) -> PackedRows:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 200, rows * length))
    return PackedRows(tokens, torch.arange(rows + 1) * length, torch.full((rows,), _PROMPT))


def _core_seconds(action: Callable[[], object]) -> float:
    """Return the median seconds that this process computed, at a quiet core's pace, after a
    round that warms up.
    """
    found: list[float] = []
    for _ in range(_ROUNDS + 1):
        before, began = pace(), time.process_time()
        action()
        used = time.process_time() - began
        found.append(used / mean((before, pace())))
    return median(found[1:])
