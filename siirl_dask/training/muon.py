"""Muon on a rank's part of the matrices of a network, by ``torch.optim.Muon``: whole matrices, or
shards of them.

A step accumulates momentum (Nesterov's), brings the singular values of the result close to 1 by
five steps of Newton-Schulz in bfloat16, and multiplies it by ``0.2 * sqrt(max(rows, columns))``,
which makes its root mean square that of a step of AdamW: learning rate and weight decay carry over
(arXiv:2502.16982).

A parameter of three dimensions is a stack of matrices, such as the experts of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from siirl_dask.training.parallel.all_to_all import exchange

MOMENTUM = "momentum_buffer"  # in the state of torch.optim.Muon
_DECAY = 0.95  # of the momentum, as in arXiv:2502.16982
_SCALE = "match_rms_adamw"
_BUCKET = 64 * 2**20  # bytes of a message
Waiting = Callable[[], AbstractContextManager[object]]
"""Function whose context is entered for what waits for other ranks."""


class WholeMatrices:
    """Steps matrices that every rank has in full: each rank steps a share of them, and gives these
    to the others.

    So a matrix is computed once, and ranks stay equal whatever their devices and threads are:
    products of matrices are rounded otherwise on another device, or with other threads.
    """

    def __init__(
        self,
        parts: Mapping[str, Tensor],
        rates: Mapping[str, float],
        weight_decay: float,
    ) -> None:
        """``parts``, [rows, columns] or a stack of these, have their gradients. ``rates`` are as
        for ``Optimizer``.
        """
        self.momentum = {name: torch.zeros_like(part) for name, part in parts.items()}
        """Moment of each parameter, in the shape of its part."""
        self._parts = parts
        self._rates = rates
        self._weight_decay = weight_decay
        # so that shares are about equal
        self._by_size = sorted(parts, key=lambda name: -parts[name].numel())

    def step(self, lr: float, group: Any, waiting: Waiting) -> None:
        """Step along the gradients, which all ranks of ``group`` have alike; None is a group of
        one. All its ranks must call. ``waiting()`` is entered for what waits for them.
        """
        ranks = 1
        own = 0
        if group is not None:
            ranks = dist.get_world_size(group)
            own = dist.get_rank(group)
        shares = [self._by_size[rank::ranks] for rank in range(ranks)]
        for rank, names in enumerate(shares):
            if rank == own:
                self._step_own(names, lr)
            else:
                self._follow(names)
        if ranks > 1:
            with waiting():
                self._spread(shares, group)

    def _step_own(self, names: Sequence[str], lr: float) -> None:
        if not names:
            return
        optimizer = torch.optim.Muon(
            [
                {"params": self._matrices(name), "lr": lr * self._rates.get(name, 1.0)}
                for name in names
            ],
            weight_decay=self._weight_decay,
            momentum=_DECAY,
            adjust_lr_fn=_SCALE,
        )
        for name, of_name in zip(names, optimizer.param_groups, strict=True):
            for matrix, momentum in zip(
                of_name["params"], _matrices(self.momentum[name]), strict=True
            ):
                optimizer.state[matrix] = {MOMENTUM: momentum}
        optimizer.step()

    def _matrices(self, name: str) -> Sequence[Tensor]:
        """Return the matrices of a parameter with their gradients."""
        part = self._parts[name]
        assert part.grad is not None
        matrices = _matrices(part)
        for matrix, gradient in zip(matrices, _matrices(part.grad), strict=True):
            matrix.grad = gradient
        return matrices

    def _follow(self, names: Sequence[str]) -> None:
        """Take gradients into the momentum as torch.optim.Muon does: each rank has a whole
        state.
        """
        for name in names:
            gradient = self._parts[name].grad
            assert gradient is not None
            self.momentum[name].lerp_(gradient, 1 - _DECAY)

    def _spread(self, shares: Sequence[Sequence[str]], group: Any) -> None:
        """Give each rank's share to the others."""
        for rank, names in enumerate(shares):
            if names:
                parts = [self._parts[name] for name in names]
                dist._broadcast_coalesced(group, parts, _BUCKET, rank)  # type: ignore[attr-defined]  # no stubs


class ShardedMatrices:
    """Steps matrices of which each rank has some rows, and stacks of which it has some matrices, as
    FSDP shards them.

    The ranks share the work: each gets as many matrices as any other, or one less, brings their
    rows together from all ranks, and gives the rows of the step back. The matrices may be in the
    host's memory; products are computed on the device of the parameters' mesh.
    """

    def __init__(
        self,
        parameters: Mapping[str, DTensor],
        parts: Mapping[str, Tensor],
        rates: Mapping[str, float],
        weight_decay: float,
    ) -> None:
        """``parts`` are this rank's shards of ``parameters`` along their first dimension. The rest
        is as for ``WholeMatrices``. All ranks of the mesh's last axis must have the same parameters
        in the same order.
        """
        self.momentum = {name: torch.zeros_like(part) for name, part in parts.items()}
        """Moment of each parameter, in the shape of its part."""
        self._parameters = parameters
        self._parts = parts
        self._rates = rates
        self._weight_decay = weight_decay
        mesh = next(iter(parameters.values())).device_mesh
        self._device = torch.device(mesh.device_type)
        self._group = mesh.get_group(mesh.ndim - 1)
        self._ranks = dist.get_world_size(self._group)
        self._rank = dist.get_rank(self._group)
        # ranks get equal ones at a time
        by_size = sorted(parameters, key=lambda name: -parameters[name].numel())
        self._stacks = [name for name in by_size if parameters[name].ndim > 2]
        single = [name for name in by_size if parameters[name].ndim == 2]
        self._rounds = [
            single[first : first + self._ranks] for first in range(0, len(single), self._ranks)
        ]

    @torch.no_grad()
    def step(self, lr: float, group: Any, waiting: Waiting) -> None:
        """Step along the gradients. All ranks of the mesh's last axis must call; ``group`` is any
        that has them. ``waiting()`` is entered for what waits for them.
        """
        for name in self._stacks:
            rate = self._rate(lr, name)
            for matrix, direction in zip(self._parts[name], self._direction(name), strict=True):
                self._move(matrix, _stepped(direction, rate), rate)
        for names in self._rounds:
            self._share(names, lr, waiting)

    def _share(self, names: Sequence[str], lr: float, waiting: Waiting) -> None:
        """Step a matrix of each rank, or of the first ranks where there are fewer."""
        directions = [self._direction(name).reshape(-1) for name in names]
        sent = [len(direction) for direction in directions]
        sent += [0] * (self._ranks - len(names))
        received = [0] * self._ranks
        own = None
        if self._rank < len(names):
            own = names[self._rank]
        if own is not None:
            rows, columns = self._parameters[own].shape
            received = [count * columns for count in _rows_of_ranks(rows, self._ranks)]
        with waiting():
            rows_of_own = exchange(torch.cat(directions), sent, received, self._group)
        stepped = rows_of_own
        if own is not None:
            whole = rows_of_own.view(self._parameters[own].shape)
            stepped = _stepped(whole, self._rate(lr, own)).reshape(-1)
        with waiting():
            steps = exchange(stepped, received, sent, self._group).split(sent[: len(names)])
        for name, step in zip(names, steps, strict=True):
            part = self._parts[name]
            self._move(part, step.view_as(part), self._rate(lr, name))

    def _direction(self, name: str) -> Tensor:
        """Take the gradient into the momentum, as torch.optim.Muon does, and return what is to be
        orthogonalised, on the device.
        """
        gradient = self._parts[name].grad
        momentum = self.momentum[name]
        assert gradient is not None
        momentum.lerp_(gradient, 1 - _DECAY)
        return gradient.lerp(momentum, _DECAY).to(self._device)

    def _move(self, part: Tensor, step: Tensor, lr: float) -> None:
        part.mul_(1 - lr * self._weight_decay)
        part.add_(step.to(part.device))

    def _rate(self, lr: float, name: str) -> float:
        return lr * self._rates.get(name, 1.0)


def _matrices(part: Tensor) -> Sequence[Tensor]:
    """Return the matrices of a stack, as views, or the matrix."""
    if part.ndim > 2:
        return part.unbind()
    return [part]


def _rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Return how many rows each rank has of a matrix that FSDP shards: the last ones may have
    fewer, or none.
    """
    most = -(-rows // ranks)
    return [max(0, min(most, rows - most * rank)) for rank in range(ranks)]


def _stepped(direction: Tensor, lr: float) -> Tensor:
    """Return the step of torch.optim.Muon along ``direction``, momentum included: where it leads
    from 0.
    """
    step = torch.zeros_like(direction)
    step.grad = direction
    torch.optim.Muon(
        [step],
        lr=lr,
        weight_decay=0.0,
        momentum=0.0,
        nesterov=False,
        adjust_lr_fn=_SCALE,
    ).step()
    return step
