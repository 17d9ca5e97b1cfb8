"""Questions with lettered choices."""

from __future__ import annotations

import re

from siirl_dask.rewards.boxed import last_boxed

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
