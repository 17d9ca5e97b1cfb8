"""Grade-school arithmetic as GSM8K (arXiv:2110.14168) writes it: the answer is the number after ``####``."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*({_NUMBER})")
_ANY = re.compile(rf"(?<![\w.]){_NUMBER}")


def gsm8k(prompt: object, response: str, answer: object, *, flexible: bool = False, **extra: object) -> float:
    """1.0 when the response's number after its last ``####`` equals the answer's, else 0.0. ``flexible`` takes the last
    number of the response where nothing is marked.

    Commas, a dollar sign and zeros behind the point do not matter. ``answer`` is a number or a solution that ends with
    a marked one; ValueError where it holds neither.
    """
    expected = _marked(str(answer)) or _whole(str(answer))
    if expected is None:
        raise ValueError(f"answer {answer!r:.200} holds no number: expected one, or '#### ' and one")
    given = _marked(response) or (_last(response) if flexible else None)
    return float(given is not None and _value(given) == _value(expected))


def _marked(text: str) -> str | None:
    found = _MARKED.findall(text)
    return found[-1] if found else None


def _last(text: str) -> str | None:
    found = _ANY.findall(text)
    return found[-1] if found else None


def _whole(text: str) -> str | None:
    found = re.fullmatch(_NUMBER, text.strip())
    return found[0] if found else None


def _value(number: str) -> Decimal:
    return Decimal(re.sub(r"[$,]", "", number))
