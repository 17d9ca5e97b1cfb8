"""Mathematical equality, by the math-verify library: 1/2, 0.5 and a LaTeX fraction are one answer."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from siirl_dask.errors import ConfigError


def math_answer(prompt: object, response: str, answer: object, **extra: object) -> float:
    r"""1.0 when the response's answer (in ``\boxed{}``, LaTeX or plain) equals ``answer``, else 0.0.

    ``answer`` may be LaTeX or plain. ValueError where it is no mathematics, ConfigError without the extra ``math``. A
    hard expression can take minutes to compare: set ``rewards.processes`` and ``rewards.timeout``.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ConfigError("math_answer needs math-verify: pip install 'siirl_dask[math]'") from error
    text = str(answer).strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    # Its own timeouts use signals, which reach main threads only; rewards.timeout stands in for them.
    expected = parse(marked, parsing_timeout=None)
    if not expected:
        raise ValueError(f"answer {answer!r:.200} is no mathematics that math-verify can read")
    return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))


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


_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def last_boxed(text: str) -> str | None:
    r"""What is inside the last ``\boxed{...}`` whose braces close; None without one. Takes linear time."""
    opened: list[int | None] = []  # where what is boxed begins, of each brace that is open
    last = (-1, "")
    for brace in _BRACE.finditer(text):
        match brace[0]:
            case "\\{" | "\\}":
                continue
            case "{":
                opened.append(None)
            case "}":
                begin = opened.pop() if opened else None
                if begin is not None and begin > last[0]:
                    last = (begin, text[begin : brace.start()])
            case _:
                opened.append(brace.end())
    return last[1] if last[0] >= 0 else None
