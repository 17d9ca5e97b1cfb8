"""Log-probability and entropy of response tokens from hidden states, a chunk of tokens at a time.

The logits of all tokens are never in memory at once (4k tokens of a 32k vocabulary would take 2.5 GB with their
gradients): the backward pass computes each chunk again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_BYTES = 128 * 2**20  # float32 logits per chunk; glibc keeps freed blocks below 32 MiB, and memory grows tenfold


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of the targets, and entropy in nats, of ``softmax((hidden @ weight.T + bias) / temperature)``.

    [K, D], [V, D], [V] or None, [K] -> [K], [K]. The product has the dtype of ``hidden``, all else at least float32.
    Both results carry gradients to hidden, weight and bias.
    """
    chunk = chunk or max(1, _CHUNK_BYTES // (4 * weight.shape[0]))
    apply: Any = _TokenLogprobs.apply
    result: tuple[Tensor, Tensor] = apply(hidden, weight, bias, targets, temperature, chunk)
    return result


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Compute log-probs of the whole vocabulary. [n, D], [V, D], [V] -> [n, V]."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits if temperature == 1 else logits.div_(temperature)).log_softmax(-1)


def _by_logits(
    scores: Tensor, targets: Tensor, entropy: Tensor, by_logprob: Tensor | None, by_entropy: Tensor | None
) -> Tensor:
    """Compute the gradient by logits, ``onehot by_logprob - p (by_logprob + by_entropy (log p + H))``, in place.

    The result takes the memory of ``scores``, which is log p: page faults of another matrix would cost as much as the
    arithmetic. [n, V], [n, 1] each -> [n, V].
    """
    factor = torch.zeros_like(entropy) if by_logprob is None else by_logprob
    if by_entropy is not None:
        factor = (scores + entropy).mul_(by_entropy).add_(factor)
    by_logits = scores.exp_().mul_(-factor)
    return by_logits if by_logprob is None else by_logits.scatter_add_(1, targets, by_logprob)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        cast, cast_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(len(targets), dtype=dtype, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            scores = _log_softmax(hidden[part], cast, cast_bias, temperature)
            logprobs[part] = scores.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = -scores.exp().mul_(scores).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Use ``d logp / d logit = onehot - p`` and ``d H / d logit = -p (log p + H)``, both over the temperature."""
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        if by_entropy is not None and not by_entropy.any():  # sequence parallelism passes zeros; None saves two chunks
            by_entropy = None
        gradients = [None if each is None else each / ctx.temperature for each in (by_logprob, by_entropy)]
        cast, cast_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        for_hidden = torch.empty_like(hidden)
        wide = torch.promote_types(weight.dtype, torch.float32)  # the sum over many chunks needs the digits
        _, head_learns, bias_learns, *_ = ctx.needs_input_grad  # a frozen head needs no [V, D] gradient
        for_weight = torch.zeros_like(weight, dtype=wide) if head_learns else None
        for_bias = torch.zeros_like(bias, dtype=wide) if bias_learns else None
        for start in range(0, len(targets), ctx.chunk):
            part = slice(start, start + ctx.chunk)
            scores = _log_softmax(hidden[part], cast, cast_bias, ctx.temperature)
            of_chunk = (None if each is None else each[part, None] for each in gradients)
            by_logits = _by_logits(scores, targets[part, None], entropy[part, None], *of_chunk).to(hidden.dtype)
            for_hidden[part] = by_logits @ cast
            if for_weight is not None:
                for_weight += by_logits.T @ hidden[part]
            if for_bias is not None:
                for_bias += by_logits.sum(0)
        for_weight = None if for_weight is None else for_weight.to(weight.dtype)
        for_bias = None if for_bias is None else for_bias.to(bias.dtype)
        return for_hidden, for_weight, for_bias, None, None, None
