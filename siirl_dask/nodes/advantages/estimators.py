"""Unbiased estimates of what k samples of a prompt would give, from n samples of it.

Each is the mean over all choices of k of the n samples, computed in integers and fractions and
rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb


def pass_at_k_estimate(samples: int, right: int, k: int) -> float:
    """Return the chance that at least one of ``k`` samples is right, where ``right`` of ``samples``
    are.

    ``1 - C(n - c, k) / C(n, k)`` (arXiv:2107.03374), with 1 <= k <= samples.
    """
    choices = _choices(samples, k)
    return (choices - comb(samples - right, k)) / choices


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the mean of the highest reward of ``k`` samples. [n] -> one.

    The i-th lowest reward is the highest in ``C(i - 1, k - 1)`` choices.
    """
    choices = _choices(len(rewards), k)
    total = sum(
        Fraction(reward) * comb(below, k - 1) for below, reward in enumerate(sorted(rewards))
    )
    return float(total / choices)


def majority_at_k(answers: Sequence[str], rewards: Sequence[float], k: int) -> float:
    """Return the mean reward of the majority answer of ``k`` samples (self-consistency,
    arXiv:2203.11171).

    [n], [n] -> one. Among answers with equally many votes the one that occurs first in all n
    samples wins. Equal answers with different rewards count with their mean.
    """
    rewards_of: dict[str, list[Fraction]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        rewards_of.setdefault(answer, []).append(Fraction(reward))
    choices = _choices(len(answers), k)
    wins = _wins([len(own) for own in rewards_of.values()], k)
    total = sum(
        won * sum(own) / len(own) for won, own in zip(wins, rewards_of.values(), strict=True)
    )
    return float(total / choices)


def mean(rewards: Sequence[float]) -> float:
    """Return the mean of at least one reward, rounded once. [n] -> one."""
    return float(sum(map(Fraction, rewards)) / len(rewards))


def _choices(samples: int, k: int) -> int:
    """Return the number of choices of k samples. ValueError when there are none."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} of {samples} samples: expected 1 to {samples}")
    return comb(samples, k)


def _wins(counts: Sequence[int], k: int) -> list[int]:
    """Return in how many choices of k samples each answer wins; ``counts`` are the samples that
    give each answer.

    Generating functions: the coefficient of x^v in an answer's polynomial counts the choices of v
    of its samples. An answer wins with ``votes`` votes where all answers before it have fewer and
    all after it have no more.
    """
    wins = [0] * len(counts)
    for votes in range(1, min(k, max(counts)) + 1):
        others = k - votes
        before = [[1]]
        for count in counts[:-1]:
            before.append(_times(before[-1], _votes(count, votes - 1), others))
        after = [1]
        for at in reversed(range(len(counts))):
            wins[at] += comb(counts[at], votes) * _coefficient(before[at], after, others)
            after = _times(after, _votes(counts[at], votes), others)
    return wins


def _votes(count: int, limit: int) -> list[int]:
    """Return the polynomial of an answer with at most ``limit`` votes."""
    return [comb(count, votes) for votes in range(min(count, limit) + 1)]


def _times(left: Sequence[int], right: Sequence[int], degree: int) -> list[int]:
    """Return the product of two polynomials up to x^degree."""
    product = [0] * min(len(left) + len(right) - 1, degree + 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(product) - i]):
            product[i + j] += a * b
    return product


def _coefficient(left: Sequence[int], right: Sequence[int], degree: int) -> int:
    """Return the coefficient of x^degree in the product of two polynomials."""
    total = 0
    for i, a in enumerate(left[: degree + 1]):
        if degree - i < len(right):
            total += a * right[degree - i]
    return total
