"""Rewards that compare the response with the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from siirl_dask.rewards.math_answers import last_boxed


def exact_match(prompt: object, response: str, answer: object, **extra: object) -> float:
    """1.0 when the response is the answer, white space around either aside; else 0.0."""
    return float(response.strip() == str(answer).strip())


_STATED = re.compile(r"\b(?:answer|choice|option)\b[\s*_]*(?:is\b|:)?[\s*_:(\[]*([A-Z])\b", re.IGNORECASE)
_ALONE = re.compile(r"[*_(\[]*([A-Za-z])[)\].:*_]*")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{(.*)\}")


def multiple_choice(
    prompt: object, response: str, answer: object, *, letters: str = "ABCDEFGH", **extra: object
) -> float:
    r"""1.0 when the response chooses the letter ``answer``, else 0.0. ValueError where that is none of ``letters``.

    What it chooses: the letter in its last ``\boxed{}``; else the last one it states (``the answer is (B)``,
    ``Answer: B``); else its last line, if that is a letter alone.
    """
    expected = str(answer).strip().strip("().").upper()
    if len(expected) != 1 or expected not in letters:
        raise ValueError(f"answer {answer!r:.200} is no choice: expected one of the letters {letters}")
    return float(_chosen(response, letters) == expected)


def _chosen(response: str, letters: str) -> str | None:
    boxed = last_boxed(response)
    if boxed is not None:
        inner = _WRAPPED.fullmatch(boxed.strip())
        return _alone(inner[1] if inner else boxed)
    stated = [letter for letter in _STATED.findall(response) if letter in letters]
    return stated[-1] if stated else _alone(response.rstrip().rpartition("\n")[2])


def _alone(text: str) -> str | None:
    found = _ALONE.fullmatch(text.strip())
    return found[1].upper() if found else None


THINK_THEN_ANSWER = r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
"""One thought, then one answer, and nothing beside them."""


def matches_format(
    prompt: object, response: str, answer: object, *, pattern: str = THINK_THEN_ANSWER, **extra: object
) -> float:
    """1.0 when the whole response matches the regular expression, in which a dot is any character; else 0.0."""
    return float(re.fullmatch(pattern, response, re.DOTALL) is not None)


def brevity(prompt: object, response: str, answer: object, *, free: int, limit: int, **extra: object) -> float:
    """0.0 up to ``free`` characters of the response, from there linearly down to -1.0 at ``limit`` and beyond.

    For a penalty by tokens, see ``siirl_dask.nodes:penalise_overlong``.
    """
    if not 0 <= free < limit:
        raise ValueError(f"free={free}, limit={limit}: expected 0 <= free < limit")
    return -min(1.0, max(0, len(response) - free) / (limit - free))


def weighted_sum(
    prompt: object,
    response: str,
    answer: object,
    *,
    rewards: Mapping[str, Callable[..., Any]],
    weights: Mapping[str, float],
    **extra: object,
) -> dict[str, float]:
    """Several rewards at once: each by its name, and as ``reward`` the sum of each times its weight.

    Of one that gives a dict, its ``reward`` counts, and the rest is named ``NAME/PART``. ValueError when rewards and
    weights have different names, or a reward is called ``reward``.
    """
    if rewards.keys() != weights.keys() or "reward" in rewards:
        raise ValueError(f"rewards {[*rewards]}, weights {[*weights]}: expected the same names, none of them 'reward'")
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        given = reward(prompt=prompt, response=response, answer=answer, **extra)
        if not isinstance(given, Mapping):
            parts[name] = given
            continue
        parts[name] = given["reward"]
        parts |= {f"{name}/{part}": value for part, value in given.items() if part != "reward"}
    return {"reward": sum(weight * parts[name] for name, weight in weights.items()), **parts}
