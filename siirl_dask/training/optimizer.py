"""AdamW (arXiv:1711.05101) in float32 on what a rank holds of the parameters, whole or in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from siirl_dask.config import TrainerConfig
from siirl_dask.training.gradients import FlatGradients
from siirl_dask.training.schedule import learning_rate
from siirl_dask.training.shards import like, local
from siirl_dask.training.state import put

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
            yield name, like(self._parameters[name], average)

    def state(self) -> dict[str, Any]:
        """``{name: {"step", "exp_avg", "exp_avg_sq"}}``, and ``"ema"`` where one is kept: the live tensors."""
        state: dict[str, Any] = {}
        for name, part in self._parts.items():
            kept = self._adam.state[part]
            moments = {moment: like(self._parameters[name], kept[moment]) for moment in _MOMENTS}
            state[name] = {"step": kept["step"], **moments}
        for name, average in self.ema():
            state[name]["ema"] = average
        return state

    def load_state(self, state: Mapping[str, Any], steps: int) -> None:
        put(self.state(), state)
        self.steps = steps
