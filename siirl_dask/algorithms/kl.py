"""Estimates of KL(p, q) from tokens drawn from p, ``d = log p - log q`` (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``d``: unbiased, of either sign, of high variance. [K], [K] -> [K]."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``d^2 / 2``: biased, of low variance; its gradient is that of the KL. [K], [K] -> [K]."""
    return (logprobs - reference).square() / 2


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """``exp(-d) - 1 + d``: unbiased, never negative, of low variance. [K], [K] -> [K]."""
    difference = logprobs - reference
    return (-difference).expm1() + difference
