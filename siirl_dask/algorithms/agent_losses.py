"""Surrogates for turns and for several agents: one ratio for a turn, and agents that are updated
one by one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import LossInputs, TokenLoss, clipped_loss, ppo_clip
from siirl_dask.algorithms.packed import clamp_log_ratio, row_sums, spread


def turn_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mean: bool = False,
    column: str = "token_turns",
) -> TokenLoss:
    """Return PPO's loss with ``s = exp(sum over the turn of logp - old)`` as the ratio of each of
    the turn's tokens: MARFT at action level, where a turn is one action (arXiv:2504.16129). [K].

    ``mean`` divides the sum by the turn's tokens, as GSPO does with a row: a long turn then leaves
    the clip no sooner than a short one. ``column`` of ``LossInputs.columns`` holds the number of
    each token's turn in its row, which ``estimate_turn_advantages`` writes; the update names it in
    its option ``columns``. A token's gradient is ``s grad logp`` of that token alone, as in
    ``gspo``. ValueError without the column, for bounds below 0 and for ``clip_low`` above 1.

    Metrics: ``ratio`` s; ``clip_fraction``, tokens of turns that are clipped.
    """
    if column not in inputs.columns:
        raise ValueError(
            f"turn_clip needs the column {column!r}: name it in the option 'columns' of the node "
            "that updates"
        )
    offsets = _turns(inputs.columns[column], inputs.offsets)
    log_ratio = row_sums((inputs.logprobs - inputs.old_logprobs).detach(), offsets)
    if mean:
        log_ratio = log_ratio / offsets.diff().clamp(min=1)
    own_gradient = inputs.logprobs - inputs.logprobs.detach()
    ratio = clamp_log_ratio(spread(log_ratio, offsets) + own_gradient).exp()
    return clipped_loss(ratio, inputs.advantages, clip_low, clip_high)


def _turns(numbers: Tensor, offsets: Tensor) -> Tensor:
    """Return where turns begin and end: at a row's first token and where the number changes. [K]
    -> [turns + 1].
    """
    begins = torch.ones(len(numbers), dtype=torch.bool, device=numbers.device)
    begins[1:] = numbers[1:] != numbers[:-1]
    begins[offsets[:-1][offsets.diff() > 0]] = True
    starts = torch.nonzero(begins).squeeze(1)
    return torch.cat([starts, starts.new_full((1,), len(numbers))])


def happo_clip(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    column: str = "policy_change",
) -> TokenLoss:
    """Return PPO's loss with the advantage ``M = exp(change) A``, ``change`` being the sum of
    log-ratios of what agents that were updated earlier in this step wrote in the episode (HAPPO,
    arXiv:2109.11251). [K].

    Updating agents one after the other, each against what the ones before have become, never makes
    the team worse; that is what multiplying by their ratios accounts for. ``column`` of
    ``LossInputs.columns`` holds the change, which ``measure_policy_change`` writes after each
    agent's update; the update names it in its option ``columns``. It is clamped to +-20. The paper
    draws a new order of agents for each update; here it is the DAG's. ValueError without the
    column, for bounds below 0 and for ``clip_low`` above 1.

    Metrics: those of ``ppo_clip``; ``earlier_ratio``, exp(change).
    """
    if column not in inputs.columns:
        raise ValueError(
            f"happo_clip needs the column {column!r}: name it in the option 'columns' of the node "
            "that updates"
        )
    earlier = clamp_log_ratio(inputs.columns[column].to(inputs.advantages.dtype)).exp()
    result = ppo_clip(
        replace(inputs, advantages=inputs.advantages * earlier),
        clip_low=clip_low,
        clip_high=clip_high,
    )
    return TokenLoss(
        loss=result.loss, metrics={**result.metrics, "earlier_ratio": earlier.detach()}
    )
