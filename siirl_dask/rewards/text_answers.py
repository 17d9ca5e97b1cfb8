"""Rewards that compare the response with the answer."""

from __future__ import annotations


def exact_match(prompt: object, response: str, answer: object, **extra: object) -> float:
    """1.0 when the response is the answer, white space around either aside; else 0.0."""
    return float(response.strip() == str(answer).strip())
