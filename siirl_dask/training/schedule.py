"""The learning rate of each optimiser step."""

from __future__ import annotations

from math import cos, pi

from siirl_dask.config import Schedule, TrainerConfig
from siirl_dask.errors import ConfigError


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Of step 1, 2, ...: it rises linearly over ``warmup_steps``, is ``lr`` in the step after them, and falls to what
    would be ``lr * min_lr_ratio`` in the step after the last.

    linear: ``1 - p``; cosine (arXiv:1608.03983, without restarts): ``(1 + cos(pi p)) / 2``, p the share that is done of
    the steps after the warm-up. ConfigError for a rate that is to fall and nobody knows until when.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == Schedule.constant:
        return config.lr
    if config.total_steps is None:
        raise ConfigError(f"trainer.schedule={config.schedule} needs trainer.total_steps: expected a number of steps")
    done = min(1.0, (step - 1 - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    left = 1 - done if config.schedule == Schedule.linear else (1 + cos(pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
