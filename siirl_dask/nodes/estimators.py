"""What several samples of a prompt say of the model: unbiased estimates of what k samples would give.

Each is the mean over all choices of k of the n samples that there are, computed in whole numbers and fractions and
rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import comb


def pass_at_k_estimate(samples: int, right: int, k: int) -> float:
    """Chance that one of ``k`` samples at least is right, from ``right`` of ``samples`` (arXiv:2107.03374):
    ``1 - C(n - c, k) / C(n, k)``. 1 <= k <= samples.
    """
    ways = _ways(samples, k)
    return (ways - comb(samples - right, k)) / ways


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Mean of the highest reward of ``k`` samples: the i-th lowest is it in ``C(i - 1, k - 1)`` choices. [n] -> one."""
    ways = _ways(len(rewards), k)
    return float(sum(Fraction(reward) * comb(below, k - 1) for below, reward in enumerate(sorted(rewards))) / ways)


def majority_at_k(answers: Sequence[str], rewards: Sequence[float], k: int) -> float:
    """Mean reward of the answer that most of ``k`` samples give (self-consistency, arXiv:2203.11171). [n], [n] -> one.

    Of answers with as many votes that one wins whose first sample is the first of all n. Samples that give one answer
    and have several rewards count with their mean.
    """
    given: dict[str, list[Fraction]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        given.setdefault(answer, []).append(Fraction(reward))
    ways = _ways(len(answers), k)
    wins = _wins([len(of_answer) for of_answer in given.values()], k)
    total = sum(won * sum(of_answer) / len(of_answer) for won, of_answer in zip(wins, given.values(), strict=True))
    return float(total / ways)


def mean(rewards: Sequence[float]) -> float:
    """[n] -> one; n of at least 1."""
    return float(sum(map(Fraction, rewards)) / len(rewards))


def _ways(samples: int, k: int) -> int:
    """Choices of k samples. ValueError when there are none."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} of {samples} samples: expected 1 to {samples}")
    return comb(samples, k)


def _wins(counts: Sequence[int], k: int) -> list[int]:
    """In how many choices of k samples each answer wins, of answers that ``counts`` samples give.

    Generating functions: the x^v of an answer counts the choices of v of its samples. An answer wins with ``most``
    votes where those before it have fewer and those after it no more.
    """
    wins = [0] * len(counts)
    for most in range(1, min(k, max(counts)) + 1):
        others = k - most
        before = [[1]]
        for count in counts[:-1]:
            before.append(_times(before[-1], _votes(count, most - 1), others))
        after = [1]
        for at in reversed(range(len(counts))):
            wins[at] += comb(counts[at], most) * _coefficient(before[at], after, others)
            after = _times(after, _votes(counts[at], most), others)
    return wins


def _votes(count: int, limit: int) -> list[int]:
    """Coefficients of an answer with at most ``limit`` votes."""
    return [comb(count, votes) for votes in range(min(count, limit) + 1)]


def _times(left: Sequence[int], right: Sequence[int], degree: int) -> list[int]:
    """The product of two polynomials up to x^degree."""
    product = [0] * min(len(left) + len(right) - 1, degree + 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right[: len(product) - i]):
            product[i + j] += a * b
    return product


def _coefficient(left: Sequence[int], right: Sequence[int], degree: int) -> int:
    """That of x^degree in the product of two polynomials."""
    return sum(a * right[degree - i] for i, a in enumerate(left) if 0 <= degree - i < len(right))
