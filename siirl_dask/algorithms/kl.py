"""Estimates of KL(p, q) from tokens drawn from p, ``d = log p - log q`` (http://joschu.net/blog/kl-approx.html).

All depend on the difference of their arguments alone. As a loss, k2 has the gradient of the KL; k1's has mean 0.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

KLFn = Callable[[Tensor, Tensor], Tensor]
"""``(logprobs [K], reference [K]) -> [K]``."""


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``d``: unbiased, of either sign, of high variance. [K], [K] -> [K]."""
    return logprobs - reference


def absolute(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``|d|``: never negative; no estimate of the KL, a price of any difference. [K], [K] -> [K]."""
    return (logprobs - reference).abs()


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``d^2 / 2``: biased, of low variance; its gradient is that of the KL. [K], [K] -> [K]."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased, never negative, of low variance. [K], [K] -> [K]."""
    difference = logprobs - reference
    return (-difference).expm1() + difference


def straight_through(logprobs: Tensor, reference: Tensor, *, value: KLFn = k3) -> Tensor:
    """``value``'s value with k2's gradient, which in expectation is that of the KL. [K], [K] -> [K]."""
    gradient = k2(logprobs, reference)
    return value(logprobs, reference).detach() + (gradient - gradient.detach())
