"""Advantages of whole responses, computed from their rewards and from the group (the prompt) each
belongs to.

Shapes: R responses, in groups that are always complete. Most functions here use nothing beyond a
group's own rows, and sum in float64 with exact rounding. Their results are therefore the same, bit
for bit, in any row order, beside any other rows and on any number of workers. Some also scale every
row by numbers of the whole batch: ``grpo`` with ``scale="batch"``, ``gpg`` and ``gdpo``.

A group whose rewards are all equal has advantage 0, exactly. A group with a reward that is not
finite has nan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum, isfinite, nan, sqrt
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcomes:
    """R responses that were scored, in complete groups. ValueError when the shapes differ."""

    rewards: Tensor
    """[R] float32 reward of each response."""
    group_ids: Tensor
    """[R] int64 number of the prompt that each response answers."""
    lengths: Tensor
    """[R] int64 count of response tokens that the loss trains on."""
    baselines: Tensor | None = None
    """[R] float32 reward of the greedy response to the same prompt; None when no node generated
    one."""
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    """Rewards of several kinds by name, [R] float32 each: what the reward function returned in a
    dict, those parts that the option ``parts`` of the node names.
    """
    all_sum: Callable[[Sequence[float]], Sequence[float]] = list
    """Sums each number over all workers that hold rows of the batch. Every worker must call it
    equally often, rows or not. The default treats these rows as the whole batch.
    """

    def __post_init__(self) -> None:
        check_shapes(
            "[R]",
            rewards=self.rewards,
            group_ids=self.group_ids,
            lengths=self.lengths,
            baselines=self.baselines,
        )
        check_shapes("[R]", rewards=self.rewards, **self.parts)


AdvantageFn = Callable[[Outcomes], Tensor]
"""``Outcomes -> advantages [R] float32``."""

# as in siiRL and verl (TRL: 1e-4); a group without spread has advantage 0, not 0 / 0
_EPSILON = 1e-6
_Row = tuple[float, int]  # reward, length


def grpo(
    outcomes: Outcomes, *, scale: Literal["group", "batch"] = "group", epsilon: float = _EPSILON
) -> Tensor:
    """Standardise rewards in each group: ``(r - mean) / (std + epsilon)``, std unbiased (GRPO,
    arXiv:2402.03300). [R].

    ``scale="batch"`` divides by the std of all rewards of the batch, over all workers, instead of
    the group's (Lite PPO, arXiv:2508.08221), so that groups which nearly agree are not blown up.
    ``epsilon`` is 1e-6 in verl and 1e-4 in TRL.

    A group of one keeps mean 0, and with ``scale="group"`` std 1: its advantage is its reward. With
    ``scale="batch"`` a batch without spread has std 1, and a reward that is not finite makes every
    row nan. ValueError for any other ``scale``, and when ``epsilon`` is not above 0.
    """
    _check_epsilon(epsilon)
    if scale == "group":
        return _map_groups(outcomes, partial(_standardise, epsilon=epsilon))
    if scale != "batch":
        raise ValueError(
            f"scale={scale!r}: expected 'group' or 'batch'; dr_grpo divides by no standard "
            "deviation"
        )
    _, std = _batch_moments(outcomes.rewards, outcomes.all_sum)
    divisor = std + epsilon
    return _map_groups(outcomes, lambda rows: [centred / divisor for centred in _centre(rows)])


def gdpo(
    outcomes: Outcomes,
    *,
    weights: Mapping[str, float] = MappingProxyType({}),
    divide_by_std: bool = True,
    epsilon: float = _EPSILON,
) -> Tensor:
    """Standardise each kind of reward in its group, add them up, and standardise the sums over the
    batch (GDPO, arXiv:2601.05242). [R].

    ``sum over kinds of weight (r - mean) / (std + epsilon)``, as ``grpo`` has it or without
    ``divide_by_std`` ``dr_grpo``, and then ``(a - mean) / (std + epsilon)`` over the rows of all
    workers. GRPO adds the rewards up first: rows that differ in which of them they earned then have
    the same advantage, and a reward of small spread has no say. ``weights`` are 1 where they name
    no other. A batch without spread has 0.

    ValueError without ``Outcomes.parts``, for a weight of none of them, and when ``epsilon`` is not
    above 0.
    """
    _check_epsilon(epsilon)
    if not outcomes.parts:
        raise ValueError(
            "gdpo needs the parts of a reward that is a dict: name them, as in nodes: {advantage: "
            "{with: {parts: [accuracy, format]}}}"
        )
    if unknown := sorted(weights.keys() - outcomes.parts.keys()):
        raise ValueError(
            f"weights={dict(weights)}: {unknown[0]!r} is none of the parts {sorted(outcomes.parts)}"
        )
    totals = torch.zeros_like(outcomes.rewards, dtype=torch.float64)
    for name, rewards in outcomes.parts.items():
        of_kind = replace(outcomes, rewards=rewards)
        advantages = grpo(of_kind, epsilon=epsilon) if divide_by_std else dr_grpo(of_kind)
        totals += weights.get(name, 1.0) * advantages.double()
    mean, std = _batch_moments(totals, outcomes.all_sum)
    return ((totals - mean) / (std + epsilon)).float()


def dr_grpo(outcomes: Outcomes) -> Tensor:
    """Centre rewards in each group: ``r - mean`` (Dr.GRPO, arXiv:2503.20783). [R].

    Dividing by the std, as GRPO does, favours prompts that are too easy or too hard. A group of one
    keeps mean 0.
    """
    return _map_groups(outcomes, _centre)


def rloo(outcomes: Outcomes) -> Tensor:
    """Subtract the mean of the others in the group: ``r - mean of the others`` (RLOO,
    arXiv:2402.14740). [R].

    A group of one has no others, and advantage 0.
    """
    return _map_groups(outcomes, _subtract_mean_of_others)


def remax(outcomes: Outcomes) -> Tensor:
    """Subtract the reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505). [R].

    ValueError when there are no baselines.
    """
    if outcomes.baselines is None:
        raise ValueError(
            "remax needs the reward of each prompt's greedy response: add the nodes "
            "siirl_dask.nodes:generate_with_greedy and siirl_dask.nodes:take_greedy_baselines"
        )
    return outcomes.rewards - outcomes.baselines


def opo(outcomes: Outcomes) -> Tensor:
    """Subtract the group's mean reward weighted by response length (OPO, arXiv:2505.23585). [R].

    A group of one, and one without tokens, has advantage 0.
    """
    return _map_groups(outcomes, _subtract_weighted_mean)


def pass_at_k(
    outcomes: Outcomes, *, divide_by_std: bool = False, epsilon: float = _EPSILON
) -> Tensor:
    """Credit a response with what it adds to its group's best reward, k being the group's size
    (arXiv:2503.19595). [R].

    The best response has its lead over the second best and all others have 0, which is the
    leave-one-out baseline of the maximum. Two that share the best reward, and a group of one, have
    0. ``divide_by_std`` divides by ``std + epsilon`` of the group's rewards, as ``grpo`` does;
    Pass@k Training (arXiv:2508.10751) standardises its advantages as well. ValueError when
    ``epsilon`` is not above 0.
    """
    _check_epsilon(epsilon)
    if not divide_by_std:
        return _map_groups(outcomes, _lead_over_second)
    return _map_groups(
        outcomes, lambda rows: [lead / (_std(rows) + epsilon) for lead in _lead_over_second(rows)]
    )


def max_rl(outcomes: Outcomes) -> Tensor:
    """Centre rewards in each group and divide by their mean, ``(r - mean) / mean`` (MaxRL,
    arXiv:2602.02710). [R].

    With rewards of 0 and 1 the gradient is then that of ln p, p being the chance of success, up to
    the order of the group's size: a prompt counts as 1 / p, which neither RLOO (1) nor GRPO (1 /
    sqrt(p (1 - p))) does. A group without success and a group of one have 0. ValueError for a
    reward below 0, which is no share of success.
    """
    if negative := int((outcomes.rewards < 0).sum()):
        raise ValueError(
            f"max_rl: {negative} of {len(outcomes.rewards)} rewards are below 0: expected at least "
            "0, such as 1 for a "
            "success; a KL or a length penalty in the reward does not go with it"
        )
    return _map_groups(outcomes, _divide_by_mean)


def gpg(outcomes: Outcomes, *, divide_by_std: bool = False, epsilon: float = _EPSILON) -> Tensor:
    """Centre rewards in each group and multiply by ``alpha = B / (B - M)`` (GPG, arXiv:2504.02546,
    equation 7). [R].

    B counts the groups of the batch on all workers, M those whose advantages are all 0. These add
    nothing to the gradient and still count in the loss's denominator; alpha makes up for that. The
    loss to train with is ``policy_gradient``. The correction is exact where every response counts
    alike (``sequence_mean_token_mean``); the paper aggregates by ``token_mean``.

    ``divide_by_std`` chooses the paper's F_norm: False is 1, as in its best runs, True is ``std +
    epsilon`` as in ``grpo``. A group of one keeps mean 0 and std 1. ValueError when ``epsilon`` is
    not above 0.
    """
    advantages = grpo(outcomes, epsilon=epsilon) if divide_by_std else dr_grpo(outcomes)
    groups = outcomes.group_ids.unique()
    nonzero_groups = outcomes.group_ids[advantages != 0].unique()
    total, nonzero = outcomes.all_sum([float(len(groups)), float(len(nonzero_groups))])
    return advantages * (total / max(1.0, nonzero))


def _standardise(rows: list[_Row], epsilon: float) -> list[float]:
    std = _std(rows)
    return [centred / (std + epsilon) for centred in _centre(rows)]


def _std(rows: list[_Row]) -> float:
    """Return the unbiased standard deviation of the rewards; 1 for a single row."""
    if len(rows) == 1:
        return 1.0
    return sqrt(fsum(centred * centred for centred in _centre(rows)) / (len(rows) - 1))


def _centre(rows: list[_Row]) -> list[float]:
    mean = fsum(reward for reward, _ in rows) / len(rows) if len(rows) > 1 else 0.0
    return [reward - mean for reward, _ in rows]


def _divide_by_mean(rows: list[_Row]) -> list[float]:
    mean = fsum(reward for reward, _ in rows) / len(rows)
    if mean == 0:
        return [0.0] * len(rows)
    return [(reward - mean) / mean for reward, _ in rows]


def _subtract_mean_of_others(rows: list[_Row]) -> list[float]:
    if len(rows) == 1:
        return [0.0]
    total = fsum(reward for reward, _ in rows)
    return [reward - (total - reward) / (len(rows) - 1) for reward, _ in rows]


def _subtract_weighted_mean(rows: list[_Row]) -> list[float]:
    tokens = sum(length for _, length in rows)
    if tokens == 0:  # no weights, and nothing that a loss could train on
        return [0.0] * len(rows)
    mean = fsum(reward * length for reward, length in rows) / tokens
    return [reward - mean for reward, _ in rows]


def _lead_over_second(rows: list[_Row]) -> list[float]:
    if len(rows) == 1:
        return [0.0]
    second, best = sorted(reward for reward, _ in rows)[-2:]
    return [best - second if reward == best else 0.0 for reward, _ in rows]


def _batch_moments(
    numbers: Tensor, all_sum: Callable[[Sequence[float]], Sequence[float]]
) -> tuple[float, float]:
    """Return mean and unbiased standard deviation of all workers' numbers: std 1 without spread,
    nan if one is not finite.
    """
    own = numbers.tolist()
    count, total = all_sum([float(len(own)), _sum(own)])
    mean = total / max(1.0, count)
    # A second pass over differences: a sum of squares minus the squared mean would not be 0 for
    # equal numbers.
    (squares,) = all_sum([_sum([(number - mean) ** 2 for number in own])])
    return mean, sqrt(squares / max(1.0, count - 1)) or 1.0


def _sum(numbers: list[float]) -> float:
    """Return the exactly rounded sum; nan if a number is not finite, where fsum may raise."""
    return fsum(numbers) if all(map(isfinite, numbers)) else nan


def _check_epsilon(epsilon: float) -> None:
    if not epsilon > 0:
        raise ValueError(
            f"epsilon={epsilon}: expected more than 0, so that equal rewards have advantage 0 and "
            "not 0 / 0"
        )


def _map_groups(outcomes: Outcomes, function: Callable[[list[_Row]], list[float]]) -> Tensor:
    """Apply ``function`` to the rows of each group and put the results back in the rows' places.
    [R] float32.

    A group with a reward that is not finite has nan throughout and never reaches ``function``.
    """
    members_of: dict[int, list[int]] = {}
    for row, group in enumerate(outcomes.group_ids.tolist()):
        members_of.setdefault(group, []).append(row)
    rows = list(zip(outcomes.rewards.tolist(), outcomes.lengths.tolist(), strict=True))
    advantages = [nan] * len(rows)
    for members in members_of.values():
        group_rows = [rows[row] for row in members]
        if all(isfinite(reward) for reward, _ in group_rows):
            for row, advantage in zip(members, function(group_rows), strict=True):
                advantages[row] = advantage
    return torch.tensor(advantages, dtype=torch.float32, device=outcomes.rewards.device)


def check_shapes(expected: str, **tensors: Tensor | None) -> None:
    """Check that all tensors are one-dimensional and equally long; None is passed over.

    ValueError otherwise, with each tensor's shape and ``expected``, the shape in words.
    """
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(shapes.values()))
    if len(first) != 1 or any(shape != first for shape in shapes.values()):
        named = " and ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"{named}: expected {expected} each")
