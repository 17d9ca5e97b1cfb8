"""Advantages of whole responses, from their rewards and the group (the prompt) each belongs to.

A group's numbers come from its own rewards alone, by exactly rounded sums in float64: they are the same, bit for bit,
whatever rows stand beside them and in whatever order, so on any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import fsum, sqrt

import torch
from torch import Tensor

AdvantageFn = Callable[[Tensor, Tensor], Tensor]
"""``(rewards [N] float32, group_ids [N] int64) -> advantages [N] float32``; a group is always whole."""

_EPSILON = 1e-6  # as in siiRL and verl (TRL: 1e-4); a group without spread has advantage 0, not 0 / 0


def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``(r - mean) / (std + 1e-6)`` in each group, std unbiased (arXiv:2402.03300). [N], [N] -> [N].

    A group of one keeps mean 0 and std 1: its advantage is its reward.
    """
    return _per_group(rewards, group_ids, _standardised)


def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """``r - mean`` in each group: dividing by std favours prompts that are too easy or too hard (arXiv:2503.20783).

    [N], [N] -> [N]. A group of one keeps mean 0.
    """
    return _per_group(rewards, group_ids, _centred)


def _centred(rewards: list[float]) -> list[float]:
    mean = fsum(rewards) / len(rewards) if len(rewards) > 1 else 0.0
    return [reward - mean for reward in rewards]


def _standardised(rewards: list[float]) -> list[float]:
    centred = _centred(rewards)
    std = sqrt(fsum(c * c for c in centred) / (len(centred) - 1)) if len(centred) > 1 else 1.0
    return [c / (std + _EPSILON) for c in centred]


def _per_group(rewards: Tensor, group_ids: Tensor, function: Callable[[list[float]], list[float]]) -> Tensor:
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {list(rewards.shape)} and group_ids {list(group_ids.shape)}: expected [N] and [N]")
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids.tolist()):
        rows.setdefault(group, []).append(row)
    values = rewards.tolist()
    advantages = [0.0] * len(values)
    for members in rows.values():
        for row, advantage in zip(members, function([values[row] for row in members]), strict=True):
            advantages[row] = advantage
    return torch.tensor(advantages, dtype=torch.float32, device=rewards.device)
