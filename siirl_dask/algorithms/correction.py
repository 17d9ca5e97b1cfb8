"""Importance weights for a sampler that is not quite the policy: engine and trainer compute the
probability of the same token differently.

The ratio of a token is ``w = exp(old - rollout)``: the policy before the update over the engine
that sampled. The ratio of a row is the product of its tokens' ratios, or their geometric mean.
Weights carry no gradient. Where either log-probability is not finite the weight is nan. A token of
weight 0 still counts in the loss's denominator.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Literal

import torch
from torch import Tensor

from siirl_dask.algorithms.kl import KLFn, k3
from siirl_dask.algorithms.losses import LossInputs
from siirl_dask.algorithms.packed import clamp_log_ratio, row_maxima, row_means, row_sums, spread

CorrectionFn = Callable[[LossInputs], Tensor]
"""``LossInputs -> [K]``: the weight of each token's surrogate loss."""
Level = Literal["token", "sequence"]
"""Whose ratio weighs a token: its own, or the product of all ratios of its row."""
_HIGH_ENTROPY = "high_entropy"


def truncated_is(
    inputs: LossInputs,
    *,
    cap: float = 2.0,
    low: float = 0.0,
    level: Level = "token",
) -> Tensor:
    """Truncate the ratio from above, ``min(w, cap)`` (TIS: Yao et al., Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training, https://fengyao.notion.site/off-policy-rl), and
    where ``low`` is above 0 from below too, as TRL may. [K].

    With ``level="sequence"`` w is the product of the row's ratios (Seq-TIS in Liu, Li et al., When
    Speed Kills Stability, https://richardli.xyz/rl-collapse): without bias up to the cap, and of a
    variance that grows with the row's length. ValueError unless ``cap`` is above 0 and ``low`` from
    0 to ``cap``, and for any other ``level``.
    """
    if not (cap > 0 and 0 <= low <= cap):
        raise ValueError(f"low={low}, cap={cap}: expected cap above 0, and low from 0 to cap")
    return _ratio(inputs, level).clamp(min=low, max=cap)


def masked_is(
    inputs: LossInputs,
    *,
    low: float = 0.5,
    high: float = 2.0,
    level: Level = "token",
) -> Tensor:
    """Keep the ratio w where it lies in [low, high] and put 0 elsewhere (IcePop, arXiv:2510.18855,
    section 2.3). [K].

    With ``level="sequence"`` w is the product of the row's ratios (Seq-MIS,
    https://richardli.xyz/rl-collapse). ValueError for an empty range, and for any other ``level``.
    """
    _check_range(low, high)
    ratio = _ratio(inputs, level)
    return torch.where((ratio < low) | (ratio > high), torch.zeros_like(ratio), ratio)


def reject_tokens(inputs: LossInputs, *, low: float, high: float) -> Tensor:
    """Weigh a token by 1 if its ratio lies in [low, high], else by 0: IcePop's mask without its
    weight. [K].

    ValueError for an empty range.
    """
    _check_range(low, high)
    return _accepted(_ratio(inputs, "token"), low, high)


def reject_sequences(
    inputs: LossInputs,
    *,
    low: float,
    high: float,
    over: Literal["mean", "sum"] = "mean",
) -> Tensor:
    """Weigh the tokens of a row by 1 if the geometric mean of its ratios lies in [low, high], else
    by 0 (Liu, Li et al., When Speed Kills Stability, https://richardli.xyz/rl-collapse). [K].

    With ``over="sum"`` (of logarithms) the product of the ratios has to lie there, which longer
    rows seldom do. ValueError for an empty range, and for any other ``over``.
    """
    _check_range(low, high)
    if over not in ("mean", "sum"):
        raise ValueError(f"over={over!r}: expected 'mean' or 'sum'")
    add_up = row_means if over == "mean" else row_sums
    ratio = clamp_log_ratio(add_up(_log_ratio(inputs), inputs.offsets)).exp()
    return spread(_accepted(ratio, low, high), inputs.offsets)


def reject_divergent(
    inputs: LossInputs,
    *,
    limit: float,
    estimate: KLFn = k3,
    over: Literal["token", "mean", "sum", "max"] = "max",
) -> Tensor:
    """Weigh the tokens of a row by 1 if the engine's divergence from the policy there is at most
    ``limit``, else by 0. [K].

    ``estimate`` estimates KL(rollout, old) at each token, in nats; take one that is never negative,
    such as k2 or k3. The divergence of a row is the largest of its tokens' (Trust Region Masking,
    arXiv:2512.23075, where one token that leaves the trust region masks the row), or their ``mean``
    or ``sum``; with ``over="token"`` each token has its own. The paper computes the divergence from
    whole distributions, this from the tokens that were sampled, as verl does.

    ValueError when ``limit`` is not above 0, and for any other ``over``.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit}: expected more than 0 nats")
    log_ratio = clamp_log_ratio(_log_ratio(inputs))
    divergence = estimate(-log_ratio, torch.zeros_like(log_ratio))
    match over:
        case "token":
            return _accepted(divergence, None, limit)
        case "mean":
            of_rows = row_means(divergence, inputs.offsets)
        case "sum":
            of_rows = row_sums(divergence, inputs.offsets)
        case "max":
            of_rows = row_maxima(divergence, inputs.offsets)
        case _:
            raise ValueError(f"over={over!r}: expected 'token', 'mean', 'sum' or 'max'")
    return spread(_accepted(of_rows, None, limit), inputs.offsets)


def mask_off_policy(inputs: LossInputs, *, limit: float) -> Tensor:
    """Weigh the tokens of a row by 0 if A < 0 and the *current* policy is far from the sampler,
    else by 1 (DeepSeek-V3.2, arXiv:2512.02556, equation 9). [K].

    Far is where the row's mean of ``rollout - logp`` exceeds ``limit``, in nats a token: it
    estimates KL(rollout, current policy), and so holds what engine and policy differ by and the
    updates since. Mistakes of a policy that has become unlikely to make them teach it little and
    upset it; successes are kept. ValueError when ``limit`` is not above 0.
    """
    if not limit > 0:
        raise ValueError(f"limit={limit}: expected more than 0 nats a token")
    difference = clamp_log_ratio(inputs.rollout_logprobs - inputs.logprobs.detach())
    divergence = spread(row_means(difference, inputs.offsets), inputs.offsets)
    weight = (~((inputs.advantages < 0) & (divergence > limit))).to(divergence.dtype)
    return torch.where(divergence.isnan(), divergence, weight)


def keep_high_entropy(inputs: LossInputs) -> Tensor:
    """Weigh the tokens that the column ``high_entropy`` marks by 1 and all others by 0
    (arXiv:2506.01939). [K].

    The node ``choose_high_entropy`` writes it. A token that is left out still counts in the loss's
    denominator, as in the paper. ValueError without the column, [K] bool.
    """
    if _HIGH_ENTROPY not in inputs.columns:
        raise ValueError(
            f"keep_high_entropy needs the column {_HIGH_ENTROPY!r} (there are: "
            f"{sorted(inputs.columns)}): add a node that runs siirl_dask.nodes:choose_high_entropy "
            f"before the update, and columns: [{_HIGH_ENTROPY}] to it"
        )
    return inputs.columns[_HIGH_ENTROPY].to(inputs.old_logprobs.dtype)


def combined(inputs: LossInputs, *, parts: tuple[CorrectionFn, ...]) -> Tensor:
    """Multiply the weights of several corrections: a mask of rows and a weight of tokens, say. [K].

    ValueError without parts.
    """
    if not parts:
        raise ValueError("parts=[]: expected at least one correction, such as truncated_is")
    return prod((part(inputs) for part in parts[1:]), start=parts[0](inputs))


def _log_ratio(inputs: LossInputs) -> Tensor:
    return (inputs.old_logprobs - inputs.rollout_logprobs).detach()


def _ratio(inputs: LossInputs, level: Level) -> Tensor:
    """Return the ratio that weighs each token. [K]."""
    log_ratio = _log_ratio(inputs)
    if level == "token":
        return clamp_log_ratio(log_ratio).exp()
    if level != "sequence":
        raise ValueError(f"level={level!r}: expected 'token' or 'sequence'")
    return spread(clamp_log_ratio(row_sums(log_ratio, inputs.offsets)).exp(), inputs.offsets)


def _accepted(numbers: Tensor, low: float | None, high: float) -> Tensor:
    """Return 1 where a number is at most ``high``, and at least ``low`` unless that is None, and 0
    elsewhere.

    A nan stays one: weight 0 would hide from the trainer that the row's numbers are broken.
    """
    accepted = numbers <= high
    if low is not None:
        accepted = accepted & (numbers >= low)
    return torch.where(numbers.isnan(), numbers, accepted.to(numbers.dtype))


def _check_range(low: float, high: float) -> None:
    if not 0 <= low <= high:
        raise ValueError(f"low={low}, high={high}: expected 0 <= low <= high")
