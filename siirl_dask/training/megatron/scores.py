"""Scores of tokens from hidden states, where each rank of a stage has a part of the vocabulary,
or of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from siirl_dask.training.model.logprobs import token_logprobs


def shared_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    float32: bool = False,
    group: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs of the targets, entropy in nats, and collision probability (the sum of
    squared probabilities) of ``softmax(hidden @ weight.T / temperature)``.

    [K, D], [V / n, D], [K] -> [K], [K], [K], float32, the same on each of the n ranks of ``group``;
    its ranks hold the rows of the head in their order. The product has their dtype, or is
    ``float32``. Gradients of ``hidden`` are those of the whole vocabulary. All ranks must call, and
    run the backward pass.
    """
    if group.size() == 1:
        return token_logprobs(
            hidden, weight, None, targets, temperature=temperature, float32=float32
        )
    apply: Any = _SharedLogprobs.apply
    if float32:
        hidden = hidden.float()
        weight = weight.float()
    logits = _Copied.apply(hidden, group) @ weight.T  # type: ignore[no-untyped-call]
    result: tuple[Tensor, Tensor, Tensor] = apply(logits.float() / temperature, targets, group)
    return result


def shared_tokens(scores: Sequence[Tensor], here: Tensor, group: Any) -> list[Tensor]:
    """Put together the scores of the ranks of ``group``, of which each computed those where
    ``here`` is True.

    [C] each, [K] bool -> [K] each, float32, the same on all ranks. All must call, and compute the
    same loss from them: each has the gradient of its own.
    """
    placed = [each.new_zeros(here.shape).masked_scatter(here, each) for each in scores]
    together: Tensor = _Summed.apply(torch.stack(placed), group)  # type: ignore[no-untyped-call]
    return list(together)


class _Summed(torch.autograd.Function):
    """Sums what ranks have; as all compute the same of it, the gradient of each is that of the
    sum.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


class _Copied(torch.autograd.Function):
    """Hands on hidden states that all ranks have, and sums the gradients that each has from its
    part of the head.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        total = gradient.float().contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.to(gradient.dtype), None


class _SharedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        group: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """[K, V / n] float32, [K]. With m the highest logit, ``log p = l - m - log s``, ``H = log s
        - t / s``, and the sum of squared probabilities is ``q / s^2``.
        """
        highest = logits.detach().amax(1)
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        shifted = logits - highest[:, None]
        exps = shifted.exp()
        at = targets - group.rank() * logits.shape[1]
        inside = (at >= 0) & (at < logits.shape[1])
        chosen = (
            shifted.gather(1, at.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1).where(inside, 0)
        )
        sums = torch.stack([exps.sum(1), (exps * shifted).sum(1), exps.square().sum(1), chosen])
        dist.all_reduce(sums, group=group)
        total, weighted, squares, chosen = sums.unbind(0)
        entropy = total.log() - weighted / total
        scores = shifted - total.log()[:, None]  # log p of this part of the vocabulary
        ctx.save_for_backward(scores, at.where(inside, -1), entropy)
        collision = squares / total.square()
        ctx.mark_non_differentiable(collision)
        return chosen - total.log(), entropy, collision

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        by_logprob: Tensor,
        by_entropy: Tensor,
        _: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """Use ``d logp / d logit = onehot - p`` and ``d H / d logit = -p (log p + H)``."""
        scores, at, entropy = ctx.saved_tensors
        factor = by_logprob[:, None] + by_entropy[:, None] * (scores + entropy[:, None])
        by_logits = -scores.exp() * factor
        return (
            by_logits.scatter_add_(
                1, at.clamp(min=0)[:, None], by_logprob.where(at >= 0, 0)[:, None]
            ),
            None,
            None,
        )
