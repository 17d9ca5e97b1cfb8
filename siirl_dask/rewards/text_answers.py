"""Rewards for text: the answer itself, a letter, a format, a length; and a weighted sum of
several rewards.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from siirl_dask.rewards.math_answers import last_boxed, text_of

THINK_THEN_ANSWER = (
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*"
)
"""Pattern of a response that is one thought, then one answer, and nothing else."""

_OPENED = re.compile(r"<think>\s*\Z")
_STATED_LETTER = re.compile(
    r"\b(?:answer|choice|option)\b[\s*_]*(?:is\b|:)?[\s*_:(\[]*([A-Z])\b", re.IGNORECASE
)
_LETTER_ALONE = re.compile(r"[*_(\[]*([A-Za-z])[)\].:*_]*")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s*\{(.*)\}")


def exact_match(prompt: object, response: str, answer: object, **extra: object) -> float:
    """Return 1.0 when the response is the answer, white space around either aside; else 0.0.
    ValueError for a row without an answer.

    Where the column of answers has a type for them, a fraction is the answer in whatever digits (5,
    5.0), and a truth value in whatever case.
    """
    said = response.strip()
    match answer:
        case bool():
            return float(said.lower() == str(answer).lower())
        case float() | Decimal():
            return float(_is_number(said, Decimal(str(answer))))
        case _:
            return float(said == text_of(answer).strip())


def _is_number(text: str, number: Decimal) -> bool:
    try:
        return Decimal(text) == number
    except InvalidOperation:
        return False


def multiple_choice(
    prompt: object, response: str, answer: object, *, letters: str = "ABCDEFGH", **extra: object
) -> float:
    r"""Return 1.0 when the response chooses the letter ``answer``, else 0.0. ValueError unless that
    is in ``letters``.

    The response chooses the letter in its last ``\boxed{}``; without a box, the last letter that it
    states (``the answer is (B)``, ``Answer: B``); else its last line, if that is a letter alone.
    """
    expected = str(answer).strip().strip("().").upper()
    if len(expected) != 1 or expected not in letters:
        raise ValueError(
            f"answer {answer!r:.200} is no choice: expected one of the letters {letters}"
        )
    return float(_chosen_letter(response, letters) == expected)


def matches_format(
    prompt: object,
    response: str,
    answer: object,
    *,
    pattern: str = THINK_THEN_ANSWER,
    prompt_text: str | None = None,
    **extra: object,
) -> float:
    """Return 1.0 when the whole response matches the regular expression, in which a dot is any
    character; else 0.0.

    A ``<think>`` with which the prompt ends, as some chat templates write it, counts as the
    response's own beginning. ``prompt_text`` is the prompt as the model saw it; None: ``prompt``,
    where that is a text.
    """
    before = prompt if prompt_text is None else prompt_text
    opened = _OPENED.search(before) if isinstance(before, str) else None
    whole = response if opened is None else opened[0] + response
    return float(re.fullmatch(pattern, whole, re.DOTALL) is not None)


def brevity(
    prompt: object, response: str, answer: object, *, free: int, limit: int, **extra: object
) -> float:
    """Return 0.0 for up to ``free`` characters, -1.0 from ``limit`` characters on, and in between a
    line.

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
    prompt_text: str | None = None,
    **extra: object,
) -> dict[str, float]:
    """Return several rewards by name, and as ``reward`` the sum of each times its weight.

    Those that have an argument ``prompt_text`` get it, and all get ``extra``.

    The ``reward`` of a function that returns a dict counts in the sum; its other entries are named
    ``NAME/PART``. ValueError when rewards and weights have different names, or a reward is called
    ``reward``.
    """
    if rewards.keys() != weights.keys() or "reward" in rewards:
        raise ValueError(
            f"rewards {[*rewards]}, weights {[*weights]}: expected the same names, none of them "
            "'reward'"
        )
    parts: dict[str, float] = {}
    for name, reward in rewards.items():
        seen = (
            {"prompt_text": prompt_text}
            if prompt_text is not None and reads_prompt_text(reward)
            else {}
        )
        result = reward(prompt=prompt, response=response, answer=answer, **seen, **extra)
        if not isinstance(result, Mapping):
            parts[name] = result
            continue
        parts[name] = result["reward"]
        parts |= {f"{name}/{part}": value for part, value in result.items() if part != "reward"}
    return {"reward": sum(weight * parts[name] for name, weight in weights.items()), **parts}


def reads_prompt_text(reward: Callable[..., Any]) -> bool:
    """Return whether a reward function names an argument ``prompt_text``, the prompt as the
    model saw it.
    """
    try:
        return "prompt_text" in inspect.signature(reward).parameters
    except (TypeError, ValueError):  # a callable that does not say what it takes
        return False


def _chosen_letter(response: str, letters: str) -> str | None:
    boxed = last_boxed(response)
    if boxed is not None:
        inner = _TEXT_COMMAND.fullmatch(boxed.strip())
        return _letter_alone(inner[1] if inner else boxed)
    stated = [letter for letter in _STATED_LETTER.findall(response) if letter in letters]
    return stated[-1] if stated else _letter_alone(response.rstrip().rpartition("\n")[2])


def _letter_alone(text: str) -> str | None:
    match = _LETTER_ALONE.fullmatch(text.strip())
    return match[1].upper() if match else None
