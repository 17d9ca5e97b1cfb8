"""AdamW (arXiv:1711.05101), and Muon of matrices, in float32 on a rank's part of the parameters:
whole or shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import cos, pi
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from siirl_dask.config import Schedule, TrainerConfig
from siirl_dask.devices import fused
from siirl_dask.devices.operators import PLUGIN, choose_operators
from siirl_dask.errors import ConfigError
from siirl_dask.training.muon import MOMENTUM, ShardedMatrices, Waiting, WholeMatrices
from siirl_dask.training.parallel.dtensor import like_dtensor, local, shard_count

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = "step"
_RATE = "rate"  # of a group of parameters, in units of the learning rate


class Optimizer:
    """Steps along ``gradients``. The state is complete from the start, so a checkpoint can be
    loaded in place; whoever loads one sets ``steps``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: TrainerConfig,
        rates: Mapping[str, float] = MappingProxyType({}),
        stepped: Collection[str] | None = None,
        *,
        matrices: Collection[str] = (),
        cores: int = 0,
    ) -> None:
        """``rates`` are learning rates, in units of the configured one, of parameters that have
        another. Where other ranks step the rest, ``stepped`` are the names of this rank's, at least
        one: the state is of these alone. ``matrices`` are the parameters that Muon steps, as
        ``Network.matrices`` gives them; AdamW steps the others. A step of parameters in the host's
        memory takes ``cores`` threads; 0: as many as torch has.
        """
        self._cores = cores
        self.gradients = FlatGradients(parameters.values())
        self.steps = 0
        self._config = config
        gradients = dict(zip(parameters, self.gradients.parts, strict=True))
        self._parameters = {
            name: each for name, each in parameters.items() if stepped is None or name in stepped
        }
        self._parts = {name: local(parameter) for name, parameter in self._parameters.items()}
        for name, part in self._parts.items():
            part.grad = gradients[name]
        by_adamw = {name: part for name, part in self._parts.items() if name not in matrices}
        # empty where all that this rank steps are matrices
        groups: dict[float, list[Tensor]] = {1.0: []}
        for name, part in by_adamw.items():
            groups.setdefault(rates.get(name, 1.0), []).append(part)
        self._adam = torch.optim.AdamW(
            [{"params": parts, _RATE: rate} for rate, parts in groups.items()],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self._state: dict[str, dict[str, Tensor]] = {}
        for name, part in by_adamw.items():
            moments = {moment: torch.zeros_like(part) for moment in _MOMENTS}
            self._state[name] = {_STEP: torch.zeros((), device=part.device), **moments}
            self._adam.state[part] = self._state[name]
        self._muon = _muon(
            {name: each for name, each in self._parameters.items() if name in matrices},
            self._parts,
            rates,
            config,
        )
        if self._muon is not None:
            self._state |= {
                name: {MOMENTUM: momentum} for name, momentum in self._muon.momentum.items()
            }
        device = next(iter(self._parts.values())).device
        self._by_torch = (
            choose_operators(config.operators, device.type, liger=False)["adamw"] != PLUGIN
        )
        self._ema = {}
        if config.keeps_average:
            self._ema = {name: part.clone() for name, part in self._parts.items()}

    @property
    def lr(self) -> float:
        """Learning rate of the last step, but for parameters with their own; before the first,
        the configured one.
        """
        if self.steps:
            return learning_rate(self._config, max(1, self.steps))
        return self._config.lr

    def step(self, group: Any = None, waiting: Waiting = nullcontext) -> None:
        """Update parameters and moving averages from ``gradients``.

        The ranks of ``group``, which step the same parameters along the same gradients, share the
        work of ``matrices``; None is a group of one. ``waiting()`` is entered for what waits for
        other ranks.
        """
        self.steps += 1
        for of_rate in self._adam.param_groups:
            of_rate["lr"] = self.lr * of_rate[_RATE]
        with _threads(self._cores):
            if self._by_torch:
                self._adam.step()
            else:
                self._step_fused()
            if self._muon is not None:
                self._muon.step(self.lr, group, waiting)
            if self._ema and self.steps % self._config.ema_every == 0:
                average = get_ema_multi_avg_fn(self._config.ema_decay)
                average(list(self._ema.values()), list(self._parts.values()), self.steps)

    def _step_fused(self) -> None:
        """Step as torch's AdamW does, with the same state, each parameter by torch_npu's
        operator.
        """
        config = self._config
        for group in self._adam.param_groups:
            for part, state in ((part, self._adam.state[part]) for part in group["params"]):
                state["step"] += 1
                fused.adamw(
                    part.detach(),
                    part.grad,
                    (state["exp_avg"], state["exp_avg_sq"]),
                    self.steps,
                    lr=group["lr"],
                    betas=config.betas,
                    eps=config.eps,
                    weight_decay=config.weight_decay,
                )

    def state_tensors(self) -> Iterator[Tensor]:
        """Yield the moments and moving averages, which are kept from step to step."""
        for name in self._parts:
            yield from (tensor for kind, tensor in self._state[name].items() if kind != _STEP)
        yield from self._ema.values()

    @contextmanager
    def averages_in_use(self) -> Iterator[None]:
        """Let the parameters have the values of their moving averages inside the block."""
        self._exchange_averages()
        try:
            yield
        finally:
            self._exchange_averages()

    @torch.no_grad()
    def _exchange_averages(self) -> None:
        for name, average in self._ema.items():
            weight = self._parts[name].clone()
            self._parts[name].copy_(average)
            average.copy_(weight)

    def ema(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's moving average, laid out like the parameter; nothing where none
        is kept.
        """
        for name, average in self._ema.items():
            yield name, like_dtensor(self._parameters[name], average)

    def state(self) -> dict[str, Any]:
        """Return the live tensors ``{name: {"step", "exp_avg", "exp_avg_sq"}}``, of a matrix that
        Muon steps ``{"momentum_buffer"}``, with ``"ema"`` where one is kept.
        """
        state: dict[str, Any] = {}
        for name in self._parts:
            parameter = self._parameters[name]
            state[name] = {}
            for kind, tensor in self._state[name].items():
                state[name][kind] = tensor if kind == _STEP else like_dtensor(parameter, tensor)
        for name, average in self.ema():
            state[name]["ema"] = average
        return state


def _muon(
    parameters: Mapping[str, nn.Parameter],
    parts: Mapping[str, Tensor],
    rates: Mapping[str, float],
    config: TrainerConfig,
) -> WholeMatrices | ShardedMatrices | None:
    """Return Muon of ``parameters``, which are whole or sharded all alike; None without any."""
    own = {name: parts[name] for name in parameters}
    sharded = {
        name: parameter for name, parameter in parameters.items() if isinstance(parameter, DTensor)
    }
    if sharded:
        return ShardedMatrices(sharded, own, rates, config.weight_decay)
    if own:
        return WholeMatrices(own, rates, config.weight_decay)
    return None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Have torch compute with ``count`` threads on the CPU for this thread inside the block, if it
    had fewer.

    What is computed an element at a time, as AdamW and averages are, has the same bits with any
    number of threads; a sum has not.
    """
    before = torch.get_num_threads()
    if count <= before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of step 1, 2, ...

    The rate rises linearly over ``warmup_steps``, is ``lr`` in the step after them, and falls
    towards ``lr * min_lr_ratio``, which the step after the last one would have. With p the fraction
    done of the steps after the warm-up, linear falls as ``1 - p`` and cosine (arXiv:1608.03983,
    without restarts) as ``(1 + cos(pi p)) / 2``. ConfigError for a falling rate without
    ``total_steps``.
    """
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule == Schedule.constant:
        return config.lr
    if config.total_steps is None:
        raise ConfigError(
            f"trainer.schedule={config.schedule} needs trainer.total_steps: expected a number of "
            "steps"
        )
    done = min(
        1.0, (step - 1 - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    )
    factor = 1 - done if config.schedule == Schedule.linear else (1 + cos(pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * factor)


_ALL = slice(None)
# elements; messages of 64 MiB of float32 bound the copies that a collective backend makes
_BUCKET = 16 * 2**20


def all_reduce(tensor: Tensor, group: Any) -> Tensor:
    """Sum ``tensor`` over the group in place; every rank gets the same bits. None is a group of
    one.
    """
    if group is not None:
        dist.all_reduce(tensor, group=group)
    return tensor


class FlatGradients:
    """All gradients in one flat tensor. Each ``parameter.grad`` is a view of it, so nothing is
    copied in or out.

    For a sharded parameter the view is this rank's shard, to which FSDP adds in place.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        shards = [(parameter, local(parameter)) for parameter in parameters]
        self._shard_counts = [shard_count(parameter) for parameter, _ in shards]
        self.flat = torch.zeros(sum(part.numel() for _, part in shards), device=shards[0][1].device)
        views = self.flat.split([part.numel() for _, part in shards])
        self.parts = [view.view_as(part) for (_, part), view in zip(shards, views, strict=True)]
        for (parameter, _), part in zip(shards, self.parts, strict=True):
            parameter.grad = like_dtensor(parameter, part)

    def zero(self) -> None:
        """Set all gradients to 0."""
        self.flat.zero_()

    def reduce(self, group: Any, part: slice = _ALL) -> None:
        """Sum the gradients, or a part of them all, over the group, in messages of bounded size."""
        for bucket in self.flat[part].split(_BUCKET):
            all_reduce(bucket, group)

    def squares(self, ranks: int = 1) -> Tensor:
        """Sum the squares of this rank's gradients. [] float64, since float32 loses the fifth digit
        over a million.

        A parameter in c < ``ranks`` shards is held by several ranks, and each counts the fraction c
        / ``ranks`` of it: the sum over all ranks has every parameter once.
        """
        squares = _squares(self.flat.split(_BUCKET))
        for part, count in zip(self.parts, self._shard_counts, strict=True):
            if count < ranks:  # tensor parallelism replicates embeddings and norms
                squares -= (1 - count / ranks) * _squares([part])
        return squares

    def clip(self, norm: float, limit: float) -> None:
        """Scale the gradients to norm ``limit`` if ``norm``, taken over all ranks, is larger."""
        if norm > limit:
            self.flat.mul_(limit / (norm + 1e-6))


def _squares(tensors: Iterable[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    if norms:
        return torch.stack(norms).square().sum()
    return torch.zeros((), dtype=torch.float64)
