"""Integer answers as DAPO (arXiv:2503.14476) scores them: +1 or -1, so a group's mean says which there are more of."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from siirl_dask.rewards.boxed import last_boxed

_STATED = re.compile(r"\banswer[ \t*_]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_NOTHING = re.compile(r"\\[,;!() \[\]]|\\left|\\right|\$|\s|\*\*|__")


def dapo_math(prompt: object, response: str, answer: object, **extra: object) -> float:
    r"""1.0 when the response's answer is ``answer``, else -1.0. Its answer is the rest of the line after its last
    ``Answer:``, or where there is nothing, what its last ``\boxed{}`` holds.

    Compared as numbers where both are, else as text; spaces, dollar signs, ``\text{}`` and a full stop do not matter.
    """
    stated = _STATED.findall(response)
    given = stated[-1] if stated and stated[-1].strip() else last_boxed(response)
    return 1.0 if given is not None and _normal(given) == _normal(str(answer)) else -1.0


def _normal(text: str) -> Decimal | str:
    boxed = last_boxed(text)
    text = _TEXT.sub(r"\1", text if boxed is None else boxed)
    text = _NOTHING.sub("", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")).rstrip(".")
    try:
        number = Decimal(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))
    except InvalidOperation:
        return text
    return number if number.is_finite() else text
