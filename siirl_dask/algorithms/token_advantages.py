"""Advantages of tokens, from rewards of tokens.

Here, unlike in losses, all response tokens are there, and a mask says which the policy wrote: the others (a tool's
answer) are stepped over. Rows are laid side by side and gone through from the last token to the first, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from siirl_dask.algorithms.advantages import Outcomes, check_shapes, dr_grpo
from siirl_dask.algorithms.packed import row_sums, spread

_EPSILON = 1e-8  # as in siiRL and verl; tokens without spread have advantage 0, not 0 / 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutcomes:
    """R responses of K tokens; a group is always whole. ValueError when the shapes do not fit together, or for a reward
    on a token that does not count, from which it would never arrive.
    """

    rewards: Tensor
    """[K] float32."""
    group_ids: Tensor
    """[R] int64."""
    offsets: Tensor
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none."""
    mask: Tensor
    """[K] bool: the tokens that are learned from."""
    values: Tensor | None = None
    """[K] float32, the critic's, when there is one."""

    def __post_init__(self) -> None:
        check_shapes("[K]", rewards=self.rewards, mask=self.mask, values=self.values)
        tokens, rows = len(self.rewards), len(self.group_ids)
        if self.offsets.shape != (rows + 1,) or int(self.offsets[-1]) != tokens:
            raise ValueError(
                f"offsets {list(self.offsets.shape)} end at {int(self.offsets[-1])}: expected [{rows + 1}] for "
                f"{rows} group_ids, and {tokens}, the number of rewards"
            )
        if lost := int((self.rewards[~self.mask] != 0).sum()):
            raise ValueError(
                f"{lost} rewards are on tokens that do not count: expected 0 there; move them to one that does"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    advantages: Tensor
    """[K] float32; of no meaning where the mask is False."""
    returns: Tensor
    """[K] float32: what a critic is to foresee; of no meaning where the mask is False."""


TokenAdvantageFn = Callable[[TokenOutcomes], TokenAdvantages]


def gae(outcomes: TokenOutcomes, *, discount: float = 1.0, gae_lambda: float = 1.0) -> TokenAdvantages:
    """``A = delta + discount gae_lambda A_next`` with ``delta = r + discount V_next - V`` (arXiv:1506.02438).

    After the last token both are 0; tokens that do not count hand V_next and A on unchanged. Returns are ``A + V``.
    ValueError without values.
    """
    if outcomes.values is None:
        raise ValueError("gae needs a critic's values: add the node siirl_dask.nodes:estimate_values before it")
    layout = _Layout(outcomes)
    rewards, values = layout.side_by_side(outcomes.rewards), layout.side_by_side(outcomes.values)
    advantages = torch.zeros_like(rewards)
    value_after, advantage_after = rewards.new_zeros(layout.rows), rewards.new_zeros(layout.rows)
    for at in reversed(range(layout.longest)):
        delta = rewards[:, at] + discount * value_after - values[:, at]
        advantage = delta + discount * gae_lambda * advantage_after
        value_after = torch.where(layout.counts[:, at], values[:, at], value_after)
        advantage_after = torch.where(layout.counts[:, at], advantage, advantage_after)
        advantages[:, at] = advantage_after
    packed = layout.packed(advantages)
    return TokenAdvantages(advantages=packed.float(), returns=(packed + outcomes.values.double()).float())


def reinforce_plus_plus(outcomes: TokenOutcomes, *, discount: float = 1.0) -> TokenAdvantages:
    """``A = r + discount A_next`` (REINFORCE++, arXiv:2501.03262), to be whitened over all tokens.

    Tokens that do not count hand A on unchanged. Returns are the same numbers.
    """
    layout = _Layout(outcomes)
    rewards = layout.side_by_side(outcomes.rewards)
    returns = torch.zeros_like(rewards)
    after = rewards.new_zeros(layout.rows)
    for at in reversed(range(layout.longest)):
        after = torch.where(layout.counts[:, at], rewards[:, at] + discount * after, after)
        returns[:, at] = after
    packed = layout.packed(returns).float()
    return TokenAdvantages(advantages=packed, returns=packed)


def reinforce_plus_plus_baseline(outcomes: TokenOutcomes) -> TokenAdvantages:
    """Each token has its row's summed reward minus the mean of its group (arXiv:2501.03262), to be whitened over all
    tokens. Returns are the row's summed reward.

    A group of one keeps mean 0. A row without a token that counts has no place for its reward, and is no part of its
    group's mean.
    """
    lengths = row_sums(outcomes.mask.long(), outcomes.offsets)
    sums = row_sums(outcomes.rewards.double(), outcomes.offsets).float()
    there = lengths > 0
    advantages = torch.zeros_like(sums)
    advantages[there] = dr_grpo(
        Outcomes(rewards=sums[there], group_ids=outcomes.group_ids[there], lengths=lengths[there])
    )
    return TokenAdvantages(advantages=spread(advantages, outcomes.offsets), returns=spread(sums, outcomes.offsets))


def moments(values: Tensor, mask: Tensor) -> tuple[float, float, float]:
    """Count, sum and sum of squares of the tokens that count, in float64; they add up over workers. [K], [K]."""
    counted = values[mask].double()
    return float(len(counted)), float(counted.sum()), float(counted.square().sum())


def whitened(values: Tensor, mask: Tensor, summed: Sequence[float]) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` with the mean and unbiased variance of all workers' tokens; 0 where the mask is
    False. [K], [K] -> [K]. ``summed``: all workers' ``moments``, added up. A single token has 0.
    """
    count, total, squares = summed
    mean = total / max(count, 1.0)
    variance = max((squares - total * mean) / max(count - 1.0, 1.0), 0.0)  # rounding may take it below 0
    standard = ((values.double() - mean) / (variance + _EPSILON) ** 0.5).to(values.dtype)
    return torch.where(mask, standard, torch.zeros_like(standard))


class _Layout:
    """Where each packed token lies when rows are laid side by side, [R, longest]; padding does not count."""

    def __init__(self, outcomes: TokenOutcomes) -> None:
        lengths = outcomes.offsets.diff()
        self.rows = len(lengths)
        self.longest = int(lengths.max()) if self.rows else 0
        self._row = torch.arange(self.rows, device=lengths.device).repeat_interleave(lengths)
        self._column = torch.arange(len(self._row), device=lengths.device) - spread(
            outcomes.offsets[:-1], outcomes.offsets
        )
        self.counts = lengths.new_zeros(self.rows, self.longest, dtype=torch.bool)
        self.counts[self._row, self._column] = outcomes.mask

    def side_by_side(self, packed: Tensor) -> Tensor:
        """[K] to [R, longest] float64, 0 where there is no token."""
        padded = packed.new_zeros(self.rows, self.longest, dtype=torch.float64)
        padded[self._row, self._column] = packed.double()
        return padded

    def packed(self, padded: Tensor) -> Tensor:
        """[R, longest] to [K]."""
        return padded[self._row, self._column]
