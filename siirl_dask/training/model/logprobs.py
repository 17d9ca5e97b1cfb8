"""Log-probability, entropy and collision probability of response tokens from hidden states, a block
of the vocabulary at a time.

The logits of the whole vocabulary are never in memory at once: 4k tokens of a 152k vocabulary would
take 2.5 GB, and their gradients as much again. Blocks are of the vocabulary rather than of tokens,
so that the head's gradient, the largest result ([V, D]), is written once, whatever the number of
blocks; what is added up over blocks is [K] numbers in the forward pass and [K, D] in the backward
pass, which computes each block's logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from siirl_dask.models.head import HeadOutput

_PLAIN = HeadOutput()
# bytes of a block of float32 logits, on a CPU and elsewhere
_BLOCK_BYTES = {True: 64 * 2**20, False: 256 * 2**20}
# of a block, since each block of r rows reads and writes [K, D] sums for its K r D products
_LEAST_ROWS = 1024


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    temperature: float,
    output: HeadOutput = _PLAIN,
    float32: bool = False,
    rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probs of the targets, entropy in nats, and collision probability (the sum of
    squared probabilities) of ``softmax(logits / temperature)``, where logits are what ``output``
    makes of ``hidden @ weight.T + bias``.

    [K, D], [V, D], [V] or None, [K] -> [K], [K], [K]. Weight and bias are rounded to the dtype of
    ``hidden``, which the product has as well, unless it is to be ``float32``; all else is at least
    float32. Log-probs and entropy carry gradients to hidden, weight and bias; collision
    probabilities carry none. ``rows`` of the head make a block; None: as many as the device has
    room for.
    """
    if not rows:
        on_cpu = hidden.device.type == "cpu"
        rows = logits_rows(len(targets), hidden.shape[1], len(weight), on_cpu=on_cpu)
    head_dtype = hidden.dtype
    if float32:
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    apply: Any = _TokenLogprobs.apply
    result: tuple[Tensor, Tensor, Tensor] = apply(
        hidden, weight, bias, targets, temperature, output, head_dtype, rows
    )
    return result


def logits_rows(tokens: int, hidden: int, vocabulary: int, *, on_cpu: bool) -> int:
    """Return the rows of the head [V, D] whose logits are computed at once for so many tokens.

    Neither the logits nor these rows take more than a block, unless there are very many tokens.
    """
    return min(vocabulary, max(_LEAST_ROWS, _BLOCK_BYTES[on_cpu] // (4 * max(tokens, hidden))))


class _Head:
    """Gives the logits of one block of the vocabulary after the other, in the same memory.

    Page faults of new memory for each block would cost as much as the arithmetic.
    """

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        output: HeadOutput,
        head_dtype: torch.dtype,
        rows: int,
    ) -> None:
        self.dtype = torch.promote_types(hidden.dtype, torch.float32)
        self.scale = output.factor / temperature
        """The factor of a product; where logits are bounded, it comes before."""
        self._hidden = hidden
        self._weight = weight
        self._bias = bias
        self._targets = targets
        self._head_dtype = head_dtype
        self._cap = None
        if output.cap is not None:
            self._cap = output.cap / temperature
        self._rows = min(rows, len(weight))
        self._product = hidden.new_empty(len(hidden) * self._rows)
        self._wide = (
            self._product
            if self.dtype == hidden.dtype
            else torch.empty_like(self._product, dtype=self.dtype)
        )

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield a block's rows, its part of the head [r, D], its logits [K, r], and its targets
        [K], -1 elsewhere.
        """
        for start in range(0, len(self._weight), self._rows):
            block = slice(start, min(start + self._rows, len(self._weight)))
            part = self._rounded(self._weight[block])
            product = self.like_logits(self._product, len(part))
            if self._bias is None:
                # beta=0 writes over what was there
                product.addmm_(self._hidden, part.T, beta=0, alpha=self.scale)
            else:
                offsets = self._rounded(self._bias[block])
                torch.addmm(
                    offsets,
                    self._hidden,
                    part.T,
                    beta=self.scale,
                    alpha=self.scale,
                    out=product,
                )
            logits = self.like_logits(self._wide, len(part))
            if logits is not product:
                logits.copy_(product)
            if self._cap is not None:
                logits.div_(self._cap).tanh_().mul_(self._cap)
            targets = self._targets - start
            yield block, part, logits, targets.where((targets >= 0) & (targets < len(part)), -1)

    def _rounded(self, part: Tensor) -> Tensor:
        """Return a part of the head with the digits of its dtype, in the dtype of the product."""
        return part.to(self._head_dtype).to(self._hidden.dtype)

    def slope(self, logits: Tensor) -> Tensor | None:
        """Return what logits change by where the scaled products do, in new memory; None where they
        are the same. [K, r] -> [K, r].
        """
        if self._cap is None:
            return None
        return (logits / self._cap).square_().neg_().add_(1)

    def like_logits(self, memory: Tensor, rows: int) -> Tensor:
        """Return the first numbers of ``memory`` as a block of ``rows``. [K * r or more] -> [K,
        r].
        """
        return memory[: len(self._hidden) * rows].view(len(self._hidden), rows)

    def scratch(self) -> Tensor:
        """Return memory for another block. [K * r]."""
        return torch.empty_like(self._wide)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        output: HeadOutput,
        head_dtype: torch.dtype,
        rows: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add up ``s = sum e^(l - m)``, ``t = sum e^(l - m) (l - m)`` and ``q = sum e^(2 (l - m))``
        under the highest logit m so far.

        So log p = l - m - log s, and H = log s - t / s, of which both terms are positive: no digits
        are lost. The sum of squared probabilities is q / s^2.
        """
        ctx.set_materialize_grads(False)
        head = _Head(
            hidden,
            weight,
            bias=bias,
            targets=targets,
            temperature=temperature,
            output=output,
            head_dtype=head_dtype,
            rows=rows,
        )
        highest = torch.full(
            (len(targets), 1), torch.finfo(head.dtype).min, dtype=head.dtype, device=hidden.device
        )
        total = torch.zeros_like(highest)
        weighted = torch.zeros_like(highest)
        squares = torch.zeros_like(highest)
        chosen = torch.zeros_like(highest)
        memory = head.scratch()
        for _, part, logits, at in head.blocks():
            inside = at[:, None]
            chosen = torch.where(inside >= 0, logits.gather(1, inside.clamp(min=0)), chosen)
            higher = torch.maximum(highest, logits.amax(1, keepdim=True))
            fall = highest - higher
            shrink = fall.exp()
            weighted = (weighted + total * fall) * shrink
            total = total * shrink
            squares = squares * shrink.square()
            exps = torch.exp(logits.sub_(higher), out=head.like_logits(memory, len(part)))
            total = total + exps.sum(1, keepdim=True)
            weighted = weighted + logits.mul_(exps).sum(1, keepdim=True)
            squares = squares + torch.linalg.vector_norm(exps, dim=1, keepdim=True).square()
            highest = higher
        entropy = total.log() - weighted / total
        normalizer = highest + total.log()
        ctx.save_for_backward(hidden, weight, bias, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.output = output
        ctx.head_dtype = head_dtype
        ctx.rows = rows
        collision = squares.squeeze(1) / total.squeeze(1).square()
        ctx.mark_non_differentiable(collision)
        return (chosen - highest - total.log()).squeeze(1), entropy.squeeze(1), collision

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        by_logprob: Tensor | None,
        by_entropy: Tensor | None,
        _: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """Use ``d logp / d logit = onehot - p`` and ``d H / d logit = -p (log p + H)``, both
        over the temperature.
        """
        hidden, weight, bias, targets, normalizer, entropy = ctx.saved_tensors
        # sequence parallelism passes zeros; None saves a block
        if by_entropy is not None and not by_entropy.any():
            by_entropy = None
        if by_logprob is not None:
            by_logprob = by_logprob[:, None]
        if by_entropy is not None:
            by_entropy = by_entropy[:, None]
        head = _Head(
            hidden,
            weight,
            bias=bias,
            targets=targets,
            temperature=ctx.temperature,
            output=ctx.output,
            head_dtype=ctx.head_dtype,
            rows=ctx.rows,
        )
        # a frozen head needs no [V, D] gradient
        _, head_learns, bias_learns, *_ = ctx.needs_input_grad
        for_hidden = torch.zeros_like(hidden, dtype=head.dtype)
        for_weight = None
        if head_learns:
            for_weight = torch.empty_like(weight)
        for_bias = None
        if bias_learns:
            for_bias = torch.empty_like(bias)
        memory = None
        if by_entropy is not None:
            memory = head.scratch()
        for block, part, logits, at in head.blocks():
            slope = head.slope(logits)
            scores = logits.sub_(normalizer)
            spare = None
            if memory is not None:
                spare = head.like_logits(memory, len(part))
            by_logits = _by_logits(
                scores,
                at[:, None],
                entropy=entropy,
                by_logprob=by_logprob,
                by_entropy=by_entropy,
                spare=spare,
            )
            if slope is not None:
                by_logits.mul_(slope)
            by_logits = by_logits.to(hidden.dtype)
            _add_product(for_hidden, by_logits, part, head.scale)
            if for_weight is not None:
                _write_product(for_weight[block], by_logits, hidden, head.scale)
            if for_bias is not None:
                for_bias[block] = by_logits.sum(0, dtype=head.dtype) * head.scale
        return for_hidden.to(hidden.dtype), for_weight, for_bias, None, None, None, None, None


def _by_logits(
    scores: Tensor,
    targets: Tensor,
    entropy: Tensor,
    by_logprob: Tensor | None,
    by_entropy: Tensor | None,
    spare: Tensor | None,
) -> Tensor:
    """Compute the gradient by logits, ``onehot by_logprob - p (by_logprob + by_entropy (log p +
    H))``, in place.

    The result takes the memory of ``scores``, which is log p; ``spare`` is written to where
    ``by_entropy`` is given. A token whose target is -1 has it in another block. [K, r], [K, 1] each
    -> [K, r].
    """
    factor = torch.zeros_like(entropy) if by_logprob is None else -by_logprob
    if by_entropy is not None:
        factor = torch.add(scores, entropy, out=spare).mul_(-by_entropy).add_(factor)
    by_logits = scores.exp_().mul_(factor)
    if by_logprob is None:
        return by_logits
    return by_logits.scatter_add_(1, targets.clamp(min=0), by_logprob.where(targets >= 0, 0))


def _add_product(total: Tensor, one: Tensor, other: Tensor, scale: float) -> None:
    """Add ``one @ other * scale`` to a total, which may be wider than both."""
    if total.dtype == one.dtype:
        total.addmm_(one, other, alpha=scale)
    else:
        total.add_(one @ other, alpha=scale)


def _write_product(result: Tensor, by_logits: Tensor, hidden: Tensor, scale: float) -> None:
    """Write ``by_logits.T @ hidden * scale`` to a block of the head's gradient. [K, r], [K, D]
    -> [r, D].
    """
    if result.dtype == hidden.dtype:
        result.addmm_(by_logits.T, hidden, beta=0, alpha=scale)
    else:
        torch.mul(by_logits.T @ hidden, scale, out=result)
