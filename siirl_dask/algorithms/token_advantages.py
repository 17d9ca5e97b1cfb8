"""Advantages of tokens, computed from rewards of tokens.

Shapes: K response tokens of R rows. Unlike in losses, all response tokens are present, and a mask
marks those that the policy wrote; the others (a tool's answer) pass values and advantages on
unchanged. Rows are padded to one length and processed together from the last token to the first, in
float64.
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
    """K tokens of R responses that were scored, in complete groups.

    ValueError when the shapes do not fit together, and for a reward on a masked token, which no
    advantage would see.
    """

    rewards: Tensor
    """[K] float32 reward of each token; 0 where the mask is False."""
    group_ids: Tensor
    """[R] int64 number of the prompt that each response answers."""
    offsets: Tensor
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none."""
    mask: Tensor
    """[K] bool: True on the tokens that the loss trains on."""
    values: Tensor | None = None
    """[K] float32 values of a critic; None when no node estimated them."""
    logprobs: Tensor | None = None
    """[K] float32 log-probs of the tokens; None when the node does not bring them."""
    collision: Tensor | None = None
    """[K] float32 collision probabilities (sums of squared probabilities of the vocabulary), as
    ``logprobs``."""

    def __post_init__(self) -> None:
        check_shapes("[K]", rewards=self.rewards, mask=self.mask, values=self.values)
        check_shapes("[K]", rewards=self.rewards, logprobs=self.logprobs, collision=self.collision)
        tokens = len(self.rewards)
        rows = len(self.group_ids)
        if self.offsets.shape != (rows + 1,) or int(self.offsets[-1]) != tokens:
            raise ValueError(
                f"offsets {list(self.offsets.shape)} end at {int(self.offsets[-1])}: expected "
                f"[{rows + 1}] for {rows} group_ids, and {tokens}, the number of rewards"
            )
        if masked_rewards := int((self.rewards[~self.mask] != 0).sum()):
            raise ValueError(
                f"{masked_rewards} rewards are on tokens where the mask is False: expected 0 "
                "there; move each to a token where it is True"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenAdvantages:
    """Advantages and returns of K tokens. Both are meaningless where the mask is False."""

    advantages: Tensor
    """[K] float32 advantages."""
    returns: Tensor
    """[K] float32 returns, which a critic should predict."""


TokenAdvantageFn = Callable[[TokenOutcomes], TokenAdvantages]
"""``TokenOutcomes -> TokenAdvantages``."""


def gae(
    outcomes: TokenOutcomes, *, discount: float = 1.0, gae_lambda: float = 1.0
) -> TokenAdvantages:
    """Estimate ``A = delta + discount gae_lambda A_next``, ``delta = r + discount V_next - V``
    (GAE, arXiv:1506.02438). [K].

    After the last token V_next and A_next are 0. Masked tokens pass both on unchanged. Returns are
    ``A + V``. ValueError without values.
    """
    if outcomes.values is None:
        raise ValueError(
            "gae needs a critic's values: add the node siirl_dask.nodes:estimate_values before it"
        )
    layout = _Layout(outcomes)
    rewards = layout.pad(outcomes.rewards)
    values = layout.pad(outcomes.values)
    advantages = torch.zeros_like(rewards)
    next_value = rewards.new_zeros(layout.rows)
    next_advantage = rewards.new_zeros(layout.rows)
    for position in reversed(range(layout.longest)):
        delta = rewards[:, position] + discount * next_value - values[:, position]
        advantage = delta + discount * gae_lambda * next_advantage
        next_value = torch.where(layout.mask[:, position], values[:, position], next_value)
        next_advantage = torch.where(layout.mask[:, position], advantage, next_advantage)
        advantages[:, position] = next_advantage
    packed = layout.pack(advantages)
    return TokenAdvantages(
        advantages=packed.float(), returns=(packed + outcomes.values.double()).float()
    )


def reinforce_plus_plus(outcomes: TokenOutcomes, *, discount: float = 1.0) -> TokenAdvantages:
    """Sum rewards to come, ``A = r + discount A_next`` (REINFORCE++, arXiv:2501.03262). [K].

    The node whitens them over all tokens. Masked tokens pass A on unchanged. Returns are the same
    numbers.
    """
    layout = _Layout(outcomes)
    rewards = layout.pad(outcomes.rewards)
    returns = torch.zeros_like(rewards)
    next_return = rewards.new_zeros(layout.rows)
    for position in reversed(range(layout.longest)):
        next_return = torch.where(
            layout.mask[:, position], rewards[:, position] + discount * next_return, next_return
        )
        returns[:, position] = next_return
    packed = layout.pack(returns).float()
    return TokenAdvantages(advantages=packed, returns=packed)


def reinforce_plus_plus_baseline(outcomes: TokenOutcomes) -> TokenAdvantages:
    """Give each token its row's summed reward minus the mean of its group (REINFORCE++ with a
    baseline, arXiv:2501.03262). [K].

    The node whitens them over all tokens. Returns are the row's summed reward. A group of one keeps
    mean 0. A row whose tokens are all masked has no token to carry a reward, and does not count in
    its group's mean.
    """
    lengths = row_sums(outcomes.mask.long(), outcomes.offsets)
    sums = row_sums(outcomes.rewards.double(), outcomes.offsets).float()
    has_tokens = lengths > 0
    advantages = torch.zeros_like(sums)
    advantages[has_tokens] = dr_grpo(
        Outcomes(
            rewards=sums[has_tokens],
            group_ids=outcomes.group_ids[has_tokens],
            lengths=lengths[has_tokens],
        )
    )
    return TokenAdvantages(
        advantages=spread(advantages, outcomes.offsets), returns=spread(sums, outcomes.offsets)
    )


def optimal_token_baseline(outcomes: TokenOutcomes, *, zero_tail: bool = True) -> TokenAdvantages:
    """Subtract from the rewards to come, at each place, the baseline of least variance
    (arXiv:2602.07078). [K].

    A token's squared score is estimated by ``w = 1 - 2 p + sum of p^2``, that of a row up to place
    t by ``W_t = w_1 + ... + w_t``, and the baseline of a group at place t is ``sum of G_t W_t /
    (sum of W_t + 1e-8)`` over its rows, where ``G_t`` is a row's sum of rewards from t on. Places
    count the tokens of the mask, as in verl's form for turns. From the place on where a group has
    one row left, that row would be compared with itself: its baseline is 0, and with ``zero_tail``
    False its own, which leaves next to nothing; a group of one row always has 0. Returns are ``G``.
    ValueError without log-probs and collision probabilities.
    """
    if outcomes.logprobs is None or outcomes.collision is None:
        raise ValueError(
            "optimal_token_baseline needs log-probs and collision probabilities: set the options "
            "probabilities=True of the node estimate_token_advantages and collision_probs=True of "
            "policy_logprobs"
        )
    mask = outcomes.mask
    learned = TokenOutcomes(
        rewards=outcomes.rewards[mask],
        group_ids=outcomes.group_ids,
        offsets=torch.cat(
            [outcomes.offsets[:1], row_sums(mask.long(), outcomes.offsets).cumsum(0)]
        ),
        mask=mask[mask],
    )
    layout = _Layout(learned)
    to_come = layout.pad(learned.rewards).flip(1).cumsum(1).flip(1)
    probabilities = outcomes.logprobs[mask].double().exp()
    energy = layout.pad(1 - 2 * probabilities + outcomes.collision[mask]).cumsum(1) * layout.mask

    _, group_of_row = outcomes.group_ids.unique(return_inverse=True)
    groups = int(group_of_row.max()) + 1 if layout.rows else 0
    none = to_come.new_zeros(groups, layout.longest)
    weighted = none.index_add(0, group_of_row, to_come * energy)
    weights = none.index_add(0, group_of_row, energy)
    rows_left = none.index_add(0, group_of_row, layout.mask.double())
    compared = rows_left > 1
    if not zero_tail:
        compared = compared.any(1, keepdim=True).expand_as(compared)
    baselines = torch.where(compared, weighted / (weights + _EPSILON), 0)[group_of_row]

    advantages = torch.zeros_like(outcomes.rewards)
    advantages[mask] = layout.pack(to_come - baselines).float()
    returns = torch.zeros_like(outcomes.rewards)
    returns[mask] = layout.pack(to_come).float()
    return TokenAdvantages(advantages=advantages, returns=returns)


def moments(values: Tensor, mask: Tensor) -> tuple[float, float, float]:
    """Return count, sum and sum of squares of the unmasked tokens, in float64; they add up over
    workers. [K], [K].
    """
    unmasked = values[mask].double()
    return float(len(unmasked)), float(unmasked.sum()), float(unmasked.square().sum())


def whitened(values: Tensor, mask: Tensor, total_moments: Sequence[float]) -> Tensor:
    """Return ``(x - mean) / sqrt(var + 1e-8)`` with the mean and unbiased variance over all
    workers' unmasked tokens. [K], [K] -> [K], 0 where the mask is False.

    ``total_moments`` are the ``moments`` of all workers, added up. A single token has 0.
    """
    count, total, squares = total_moments
    mean = total / max(count, 1.0)
    # rounding may take it below 0
    variance = max((squares - total * mean) / max(count - 1.0, 1.0), 0.0)
    standardised = ((values.double() - mean) / (variance + _EPSILON) ** 0.5).to(values.dtype)
    return torch.where(mask, standardised, torch.zeros_like(standardised))


class _Layout:
    """Pads packed tokens to [R, longest] and packs them again. ``mask`` is False on padding."""

    def __init__(self, outcomes: TokenOutcomes) -> None:
        lengths = outcomes.offsets.diff()
        self.rows = len(lengths)
        self.longest = int(lengths.max()) if self.rows else 0
        self._row = torch.arange(self.rows, device=lengths.device).repeat_interleave(lengths)
        self._column = torch.arange(len(self._row), device=lengths.device) - spread(
            outcomes.offsets[:-1], outcomes.offsets
        )
        self.mask = lengths.new_zeros(self.rows, self.longest, dtype=torch.bool)
        self.mask[self._row, self._column] = outcomes.mask

    def pad(self, packed: Tensor) -> Tensor:
        """Pad with 0 and convert to float64. [K] -> [R, longest]."""
        padded = packed.new_zeros(self.rows, self.longest, dtype=torch.float64)
        padded[self._row, self._column] = packed.double()
        return padded

    def pack(self, padded: Tensor) -> Tensor:
        """Drop the padding. [R, longest] -> [K]."""
        return padded[self._row, self._column]
