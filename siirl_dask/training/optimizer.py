"""AdamW (arXiv:1711.05101) in float32 on what a rank holds of the parameters, whole or in shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from siirl_dask.config import Schedule, TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.training.parallel.dtensor import copy_state, like_dtensor, local, shard_count

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """Steps along ``gradients``. Its whole state is there from the beginning, so that a checkpoint can be loaded into
    it.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: TrainerConfig) -> None:
        self.gradients = FlatGradients(parameters.values())
        self.steps = 0
        self._parameters = dict(parameters)
        self._config = config
        self._parts = {name: local(parameter) for name, parameter in parameters.items()}
        for part, gradient in zip(self._parts.values(), self.gradients.parts, strict=True):
            part.grad = gradient
        self._adam = torch.optim.AdamW(
            self._parts.values(),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for part in self._parts.values():
            moments = {name: torch.zeros_like(part) for name in _MOMENTS}
            self._adam.state[part] = {"step": torch.zeros((), device=part.device), **moments}
        self._ema = {name: part.clone() for name, part in self._parts.items()} if config.ema_decay else {}

    @property
    def lr(self) -> float:
        """Of the last step."""
        return learning_rate(self._config, max(1, self.steps)) if self.steps else self._config.lr

    def step(self) -> None:
        self.steps += 1
        for group in self._adam.param_groups:
            group["lr"] = self.lr
        self._adam.step()
        if self._ema:
            average = get_ema_multi_avg_fn(self._config.ema_decay)
            average(list(self._ema.values()), list(self._parts.values()), self.steps)

    def ema(self) -> Iterator[tuple[str, Tensor]]:
        """The moving average of each parameter, laid out as the parameter is; none without ``ema_decay``."""
        for name, average in self._ema.items():
            yield name, like_dtensor(self._parameters[name], average)

    def state(self) -> dict[str, Any]:
        """``{name: {"step", "exp_avg", "exp_avg_sq"}}``, and ``"ema"`` where one is kept: the live tensors."""
        state: dict[str, Any] = {}
        for name, part in self._parts.items():
            kept = self._adam.state[part]
            moments = {moment: like_dtensor(self._parameters[name], kept[moment]) for moment in _MOMENTS}
            state[name] = {"step": kept["step"], **moments}
        for name, average in self.ema():
            state[name]["ema"] = average
        return state

    def load_state(self, state: Mapping[str, Any], steps: int) -> None:
        copy_state(self.state(), state)
        self.steps = steps


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


_BUCKET = 16 * 2**20  # elements: 64 MiB of float32 a message, which bounds the copies a backend makes


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """Sum over the group, in place; every rank gets the same bits. ``None`` is a group of one."""
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


class FlatGradients:
    """``parameter.grad`` of each parameter is a view of it, so that nothing is copied in or out.

    Of a sharded parameter it holds this rank's shard, which FSDP adds to in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        held = [(parameter, local(parameter)) for parameter in parameters]
        self._shard_counts = [shard_count(parameter) for parameter, _ in held]
        self.flat = torch.zeros(sum(part.numel() for _, part in held), device=held[0][1].device)
        views = self.flat.split([part.numel() for _, part in held])
        self.parts = [view.view_as(part) for (_, part), view in zip(held, views, strict=True)]
        for (parameter, _), part in zip(held, self.parts, strict=True):
            parameter.grad = like_dtensor(parameter, part)

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, group: Any) -> None:
        for bucket in self.flat.split(_BUCKET):
            all_reduce(bucket, group)

    def squares(self, ranks: int = 1) -> Tensor:
        """[] float64: the sum of the squares; of what several of ``ranks`` hold alike, each counts its share. float32
        loses the fifth digit over a million elements.
        """
        squares = _squares(self.flat.split(_BUCKET))
        for part, count in zip(self.parts, self._shard_counts, strict=True):
            if count < ranks:  # tensor parallel ranks have embeddings and norms alike
                squares -= (1 - count / ranks) * _squares([part])
        return squares

    def clip(self, norm: float, limit: float) -> None:
        """Scale to ``limit`` if ``norm``, that of all gradients together, is more."""
        if norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
