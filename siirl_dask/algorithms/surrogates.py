"""Surrogates that limit the policy's step in other ways than PPO: a clipped weight, a bounded
log-probability, a soft gate, a trust region of divergences, one ratio for a whole row.
"""

from __future__ import annotations

from math import inf, log1p
from typing import Literal

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import LossInputs, TokenLoss, clipped_loss
from siirl_dask.algorithms.packed import (
    check_clip,
    clamp_by_advantage_sign,
    clamp_log_ratio,
    row_means,
    row_sums,
    spread,
)


def cispo(inputs: LossInputs, *, clip_low: float = 1.0, clip_high: float = 0.28) -> TokenLoss:
    """Return ``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp``, ``r = exp(logp - old)`` (CISPO
    in MiniMax-M1, arXiv:2506.13585). [K].

    The ratio is clipped as a weight, so every token keeps its gradient. The paper has no lower
    bound, which is ``clip_low = 1``, and tunes the upper one without naming it; 0.28 is DAPO's.
    ValueError for bounds below 0 and for ``clip_low`` above 1.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose weight is clipped.
    """
    check_clip(clip_low, clip_high)
    ratio = clamp_log_ratio(inputs.logprobs.detach() - inputs.old_logprobs).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    metrics = {"ratio": ratio, "clip_fraction": (weight != ratio).to(ratio.dtype)}
    return TokenLoss(loss=-weight * inputs.advantages * inputs.logprobs, metrics=metrics)


_MAX_DRIFT = 2.0  # bound of r - 1: beyond a ratio of 3 the pull grows no further


def cpgd(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    drift: float = 1e-3,
) -> TokenLoss:
    """Return ``-A`` times a bounded logp, plus ``drift min(sg(r) - 1, 2) logp``, ``r = exp(logp -
    old)`` (CPGD, arXiv:2505.12504). [K].

    The bounded logp is at most ``old + ln(1 + clip_high)`` where A > 0, and at least ``old + ln(1 -
    clip_low)`` elsewhere. The drift term pulls back to the old policy: its gradient is that of k3
    of KL(old, current). The default of ``drift`` is siiRL's. ValueError when ``clip_low`` is not
    from 0 to below 1.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens whose logp is at its bound; ``drift``, the term
    before its factor.
    """
    if not 0 <= clip_low < 1:
        raise ValueError(
            f"clip_low={clip_low}: expected 0 to below 1, so that ln(1 - clip_low) is a number"
        )
    log_ratio = inputs.logprobs - inputs.old_logprobs
    clamped = clamp_by_advantage_sign(
        log_ratio, inputs.advantages, log1p(-clip_low), log1p(clip_high)
    )
    ratio = clamp_log_ratio(log_ratio.detach()).exp()
    # Computed with a drift of 0 too: it is nan where logp or old is not finite, which the clamp
    # above would hide.
    pull = (ratio - 1).clamp(max=_MAX_DRIFT) * inputs.logprobs
    metrics = {
        "ratio": ratio,
        "clip_fraction": (clamped != log_ratio).to(ratio.dtype),
        "drift": pull.detach(),
    }
    return TokenLoss(
        loss=-inputs.advantages * (inputs.old_logprobs + clamped) + drift * pull, metrics=metrics
    )


def sapo(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05) -> TokenLoss:
    """Return ``-A sigmoid(tau (r - 1)) 4 / tau``, ``r = exp(logp - old)`` (SAPO, arXiv:2511.20347).
    [K].

    tau is ``tau_positive`` where A > 0 and ``tau_negative`` elsewhere. A soft gate replaces the
    clip: the gradient is ``-A g r grad logp`` with ``g = 4 s (1 - s)``, s being the sigmoid. g is 1
    at r = 1 and fades on either side, faster for a larger tau. ValueError when a tau is not above
    0.

    Metrics: ``ratio`` r; ``gate`` g.
    """
    if not (tau_positive > 0 and tau_negative > 0):
        raise ValueError(
            f"tau_positive={tau_positive}, tau_negative={tau_negative}: expected more than 0 each"
        )
    ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs).exp()
    tau = torch.full_like(ratio, tau_negative).masked_fill(inputs.advantages > 0, tau_positive)
    sigmoid = (tau * (ratio - 1)).sigmoid()
    metrics = {"ratio": ratio.detach(), "gate": (4 * sigmoid * (1 - sigmoid)).detach()}
    return TokenLoss(loss=-inputs.advantages * sigmoid * 4 / tau, metrics=metrics)


def dro(inputs: LossInputs, *, beta: float) -> TokenLoss:
    """Return ``-A logp + beta / 2 (logp - old)^2`` (DRO, arXiv:2405.19107, with the policy before
    the update for the reference, as verl has it). [K].

    A price on any move takes the clip's place: the gradient is ``-(A - beta (logp - old)) grad
    logp``, which is 0 where the log-probability has moved by ``A / beta``. ValueError when ``beta``
    is not above 0.

    Metrics: ``ratio`` r = exp(logp - old).
    """
    if not beta > 0:
        raise ValueError(f"beta={beta}: expected more than 0")
    moved = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs)
    loss = -inputs.advantages * inputs.logprobs + beta / 2 * moved.square()
    return TokenLoss(loss=loss, metrics={"ratio": moved.detach().exp()})


def dppo(
    inputs: LossInputs,
    *,
    low: float = 0.15,
    high: float = 0.15,
    divergence: Literal["tv", "kl"] = "tv",
    cap: float = 10000.0,
) -> TokenLoss:
    """Return ``-sg(min(r, cap)) A logp`` for tokens in the trust region and 0 for others, ``r =
    exp(logp - old)`` (DPPO, arXiv:2602.04879, with the binary approximations of the divergence).
    [K].

    With p and q the probabilities of the sampled token under current and old policy, ``tv`` is ``|p
    - q|``, and ``kl`` is ``q ln(q / p) + (1 - q) ln((1 - q) / (1 - p))``: the divergences of two
    distributions over that token and all others. A token is left out where its advantage moves the
    policy further out: with A > 0 where p > q and the divergence is above ``high``, elsewhere where
    p < q and it is above ``low``. Unlike the clip of a ratio this hinders rare tokens less and
    frequent ones more. The paper's runs have 0.15 for ``tv`` and 0.05 for ``kl``, verl's 10000 for
    ``cap``. ValueError for limits that are not above 0, and for any other ``divergence``.

    Metrics: ``ratio`` r; ``clip_fraction``, tokens that are left out; ``divergence``.
    """
    if not (low > 0 and high > 0 and cap > 0):
        raise ValueError(f"low={low}, high={high}, cap={cap}: expected more than 0 each")
    if divergence not in ("tv", "kl"):
        raise ValueError(f"divergence={divergence!r}: expected 'tv' or 'kl'")
    current = inputs.logprobs.detach()
    ratio = clamp_log_ratio(current - inputs.old_logprobs).exp()
    change = current.exp() - inputs.old_logprobs.exp()
    moved = change.abs() if divergence == "tv" else _binary_kl(inputs.old_logprobs, current)
    away = torch.where(
        inputs.advantages > 0, (change > 0) & (moved > high), (change < 0) & (moved > low)
    )
    inside = (~away).to(ratio.dtype)
    loss = -ratio.clamp(max=cap) * inside * inputs.advantages * inputs.logprobs
    return TokenLoss(
        loss=loss, metrics={"ratio": ratio, "clip_fraction": 1 - inside, "divergence": moved}
    )


# of 1 - p: a token of probability 1 leaves nothing for the others, in float32 as well
_SMALLEST = 1e-8


def _binary_kl(old: Tensor, current: Tensor) -> Tensor:
    """Return the KL of old from current policy, of whether a token is the sampled one.
    Log-probabilities [K] -> [K].
    """
    others = (-old.expm1()).clamp(min=_SMALLEST)
    others_now = (-current.expm1()).clamp(min=_SMALLEST)
    log_ratio = clamp_log_ratio(old - current)
    return old.exp() * log_ratio + others * (others.log() - others_now.log())


def vespo(
    inputs: LossInputs,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> TokenLoss:
    """Return ``-sg(phi) A logp`` with ``phi = w^k exp(c (1 - w))`` of the row's ratio ``w = exp(sum
    over the row of logp - old)`` (VESPO, arXiv:2602.10693). [K].

    k and c are ``power_positive`` and ``decay_positive`` where A >= 0, and ``power_negative`` and
    ``decay_negative`` elsewhere; the defaults are TRL's. phi is 1 at w = 1 and fades smoothly on
    either side, in place of a clip and without dividing by the length. The paper's w is the ratio
    to the sampler: ``algorithm.old_logprobs=siirl_dask.nodes:rollout_logprobs``. TRL aggregates by
    ``token_mean``. ValueError when an option is not above 0.

    Metrics: ``ratio`` w; ``gate`` phi.
    """
    options = {
        "power_positive": power_positive,
        "decay_positive": decay_positive,
        "power_negative": power_negative,
        "decay_negative": decay_negative,
    }
    if not all(option > 0 for option in options.values()):
        named = ", ".join(f"{name}={option}" for name, option in options.items())
        raise ValueError(f"{named}: expected more than 0 each")
    of_rows = row_sums((inputs.logprobs - inputs.old_logprobs).detach(), inputs.offsets)
    log_ratio = spread(clamp_log_ratio(of_rows), inputs.offsets)
    ratio = log_ratio.exp()
    failed = inputs.advantages < 0
    power = torch.full_like(ratio, power_positive).masked_fill(failed, power_negative)
    decay = torch.full_like(ratio, decay_positive).masked_fill(failed, decay_negative)
    gate = (power * log_ratio + decay * (1 - ratio)).exp()
    return TokenLoss(
        loss=-gate * inputs.advantages * inputs.logprobs, metrics={"ratio": ratio, "gate": gate}
    )


def gspo(inputs: LossInputs, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> TokenLoss:
    """Return PPO's loss with ``s = exp(mean over the row of logp - old)`` as the ratio of each of
    its tokens (GSPO, arXiv:2507.18071). [K].

    A token's gradient is ``s grad logp`` of that token alone, the paper's token form: ``log s_t =
    sg(mean) + logp - sg(logp)``. Aggregate by ``sequence_mean_token_mean``. ValueError for bounds
    below 0 and for ``clip_low`` above 1.

    Metrics: ``ratio`` s; ``clip_fraction``, tokens of rows that are clipped.
    """
    mean = row_means(inputs.logprobs - inputs.old_logprobs, inputs.offsets)
    return clipped_loss(_row_ratio(inputs, mean), inputs.advantages, clip_low, clip_high)


def sequence_clip(
    inputs: LossInputs, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> TokenLoss:
    """Return PPO's loss with ``s = exp(sum over the row of logp - old)`` as the ratio of each of
    its tokens. [K].

    RLOO takes a whole response for one action (arXiv:2402.14740), so its ratio is the response's;
    the clip is TRL's. A token's gradient is ``s grad logp`` of that token alone, as in ``gspo``.
    Aggregate by ``sequence_mean_token_sum``: the gradient is then that of the mean over rows of
    ``max(-A s, -A clip(s))``. ValueError for bounds below 0 and for ``clip_low`` above 1.

    Metrics: ``ratio`` s; ``clip_fraction``, tokens of rows that are clipped.
    """
    total = row_sums(inputs.logprobs - inputs.old_logprobs, inputs.offsets)
    return clipped_loss(_row_ratio(inputs, total), inputs.advantages, clip_low, clip_high)


def _row_ratio(inputs: LossInputs, log_ratio: Tensor) -> Tensor:
    """Give each token the ratio of its row, with the gradient of that token's own logp. [R]
    log-ratios -> [K].
    """
    # exactly 0: gspo's bounds are as narrow as 3e-4
    own_gradient = inputs.logprobs - inputs.logprobs.detach()
    return clamp_log_ratio(spread(log_ratio, inputs.offsets).detach() + own_gradient).exp()


def gmpo(inputs: LossInputs, *, clip_low: float = 0.4, clip_high: float = 0.4) -> TokenLoss:
    """Return ``-A`` times the geometric mean of the row's clipped ratios (GMPO, arXiv:2507.20673).
    [K].

    Each log-ratio is clamped to at most ``clip_high`` where A > 0, and to at least ``-clip_low``
    elsewhere. Every token of a row has the row's loss. Aggregate by ``sequence_mean_token_mean``.
    ValueError for bounds below 0.

    Metrics: ``ratio``, the geometric mean; ``clip_fraction``, tokens that are clipped.
    """
    check_clip(clip_low, clip_high, inf)
    log_ratio = clamp_log_ratio(inputs.logprobs - inputs.old_logprobs)
    clamped = clamp_by_advantage_sign(log_ratio, inputs.advantages, -clip_low, clip_high)
    ratio = spread(row_means(clamped, inputs.offsets).exp(), inputs.offsets)
    metrics = {"ratio": ratio.detach(), "clip_fraction": (clamped != log_ratio).to(ratio.dtype)}
    return TokenLoss(loss=-inputs.advantages * ratio, metrics=metrics)
