"""Advantages of whole responses, from their rewards and the group (the prompt) each belongs to.

A group's numbers come from its own rows alone, by exactly rounded sums in float64: they are the same, bit for bit,
whatever rows stand beside them and in whatever order, so on any number of workers. A group whose rewards are all equal
has advantage 0, exactly; one with a reward that is not finite has nan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import fsum, isfinite, nan, sqrt

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """R responses; a group is always whole. ValueError when the shapes differ."""

    rewards: Tensor
    """[R] float32."""
    group_ids: Tensor
    """[R] int64."""
    lengths: Tensor
    """[R] int64: response tokens that are learned from."""
    baselines: Tensor | None = None
    """[R] float32: reward of the greedy response to the same prompt, when there is one."""

    def __post_init__(self) -> None:
        check_shapes(
            "[R]", rewards=self.rewards, group_ids=self.group_ids, lengths=self.lengths, baselines=self.baselines
        )


AdvantageFn = Callable[[Outcomes], Tensor]
"""``Outcomes -> advantages [R] float32``."""

_EPSILON = 1e-6  # as in siiRL and verl (TRL: 1e-4); a group without spread has advantage 0, not 0 / 0
_Row = tuple[float, int]  # reward, length


def grpo(outcomes: Outcomes) -> Tensor:
    """``(r - mean) / (std + 1e-6)`` in each group, std unbiased (arXiv:2402.03300). [R].

    A group of one keeps mean 0 and std 1: its advantage is its reward.
    """
    return _per_group(outcomes, _standardised)


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """``r - mean`` in each group: dividing by std favours prompts that are too easy or too hard (arXiv:2503.20783).

    [R]. A group of one keeps mean 0.
    """
    return _per_group(outcomes, _centred)


def rloo(outcomes: Outcomes) -> Tensor:
    """``r - mean of the others`` in each group (arXiv:2402.14740). [R]. A group of one has no others, and 0."""
    return _per_group(outcomes, _against_others)


def remax(outcomes: Outcomes) -> Tensor:
    """``r - reward of the greedy response`` (arXiv:2310.10505). [R]. ValueError when there are no baselines."""
    if outcomes.baselines is None:
        raise ValueError(
            "remax needs the reward of each prompt's greedy response: add the nodes "
            "siirl_dask.nodes:generate_with_greedy and siirl_dask.nodes:take_greedy_baselines"
        )
    return outcomes.rewards - outcomes.baselines


def opo(outcomes: Outcomes) -> Tensor:
    """``r - mean of the group's rewards, weighted by length`` (arXiv:2505.23585). [R]. A group of one has 0."""
    return _per_group(outcomes, _against_weighted_mean)


def pass_at_k(outcomes: Outcomes) -> Tensor:
    """What each response adds to the best reward of its group, k being the group's size (arXiv:2503.19595). [R].

    The best has its lead over the second best, all others 0: the leave-one-out baseline of the maximum. Two that share
    the best reward, and a group of one, have 0.
    """
    return _per_group(outcomes, _lead)


def _standardised(rows: list[_Row]) -> list[float]:
    centred = _centred(rows)
    std = sqrt(fsum(c * c for c in centred) / (len(centred) - 1)) if len(centred) > 1 else 1.0
    return [c / (std + _EPSILON) for c in centred]


def _centred(rows: list[_Row]) -> list[float]:
    mean = fsum(reward for reward, _ in rows) / len(rows) if len(rows) > 1 else 0.0
    return [reward - mean for reward, _ in rows]


def _against_others(rows: list[_Row]) -> list[float]:
    if len(rows) == 1:
        return [0.0]
    total = fsum(reward for reward, _ in rows)
    return [reward - (total - reward) / (len(rows) - 1) for reward, _ in rows]


def _against_weighted_mean(rows: list[_Row]) -> list[float]:
    tokens = sum(length for _, length in rows)
    if tokens == 0:  # nothing to learn from, and no weights
        return [0.0] * len(rows)
    mean = fsum(reward * length for reward, length in rows) / tokens
    return [reward - mean for reward, _ in rows]


def _lead(rows: list[_Row]) -> list[float]:
    if len(rows) == 1:
        return [0.0]
    second, best = sorted(reward for reward, _ in rows)[-2:]
    return [best - second if reward == best else 0.0 for reward, _ in rows]


def _per_group(outcomes: Outcomes, function: Callable[[list[_Row]], list[float]]) -> Tensor:
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(outcomes.group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    rows = list(zip(outcomes.rewards.tolist(), outcomes.lengths.tolist(), strict=True))
    advantages = [nan] * len(rows)
    for members in groups.values():
        group_rows = [rows[row] for row in members]
        if all(isfinite(reward) for reward, _ in group_rows):
            for row, advantage in zip(members, function(group_rows), strict=True):
                advantages[row] = advantage
    return torch.tensor(advantages, dtype=torch.float32, device=outcomes.rewards.device)


def check_shapes(expected: str, **tensors: Tensor | None) -> None:
    """ValueError unless all that are given are one-dimensional and equally long; ``expected`` is how to say so."""
    given = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    shapes = list(given.values())
    if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
        named = " and ".join(f"{name} {shape}" for name, shape in given.items())
        raise ValueError(f"{named}: expected {expected} each")
