"""Rewards for text: the answer itself, a letter, a format, a length."""

from __future__ import annotations

import re
from decimal import Decimal

from siirl_dask.rewards.math_answers import last_boxed, text_of
from siirl_dask.rewards.written_numbers import decimal_of

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
            return float(decimal_of(said) == Decimal(text_of(answer)))
        case _:
            return float(said == text_of(answer).strip())


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
    before = prompt
    if prompt_text is not None:
        before = prompt_text
    opened = None
    if isinstance(before, str):
        opened = _OPENED.search(before)
    whole = response
    if opened is not None:
        whole = opened[0] + response
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


def _chosen_letter(response: str, letters: str) -> str | None:
    boxed = last_boxed(response)
    if boxed is not None:
        inner = _TEXT_COMMAND.fullmatch(boxed.strip())
        return _letter_alone(inner[1] if inner else boxed)
    found: list[str] = _STATED_LETTER.findall(response)
    stated = [letter for letter in found if letter in letters]
    if stated:
        return stated[-1]
    return _letter_alone(response.rstrip().rpartition("\n")[2])


def _letter_alone(text: str) -> str | None:
    match = _LETTER_ALONE.fullmatch(text.strip())
    if match is None:
        return None
    letter: str = match[1]
    return letter.upper()
