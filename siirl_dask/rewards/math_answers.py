"""Rewards for mathematical answers: equal expressions, a number after ``####``, an answer after
``Answer:``.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from siirl_dask.errors import ConfigError

_NUMBER = r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED_NUMBER = re.compile(rf"####\s*({_NUMBER})")
_ANY_NUMBER = re.compile(rf"(?<![\w.]){_NUMBER}")
_STATED_ANSWER = re.compile(r"\banswer[ \t*_]*:(.*)$", re.IGNORECASE | re.MULTILINE)
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
# spaces, delimiters, bold type
_NO_MEANING = re.compile(r"\\[,;!() \[\]]|\\left|\\right|\$|\s|\*\*|__")
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def text_of(answer: object) -> str:
    """Return an answer as a text. ValueError for null: a row without an answer is no wrong
    response.
    """
    if answer is None:
        raise ValueError("the row's answer is null: expected one to compare with")
    return str(answer)


def math_answer(prompt: object, response: str, answer: object, **extra: object) -> float:
    r"""Return 1.0 when the response's answer (in ``\boxed{}``, LaTeX or plain) equals ``answer``,
    else 0.0.

    math-verify compares: 1/2, 0.5 and a LaTeX fraction are equal. ``answer`` may be LaTeX or plain.
    ValueError where it is no mathematics, ConfigError without the extra ``math``. A hard expression
    can take minutes to compare: set ``rewards.processes`` and ``rewards.timeout``.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ConfigError(
            "math_answer needs math-verify: pip install 'siirl_dask[math]'"
        ) from error
    text = text_of(answer).strip()
    marked = text if "$" in text or "\\boxed" in text else f"${text}$"
    # math-verify's timeouts use signals, which work in main threads only: rewards.timeout stands in
    # for them.
    expected = parse(marked, parsing_timeout=None)
    if not expected:
        raise ValueError(f"answer {answer!r:.200} is no mathematics that math-verify can read")
    return float(verify(expected, parse(response, parsing_timeout=None), timeout_seconds=None))


def gsm8k(
    prompt: object, response: str, answer: object, *, flexible: bool = False, **extra: object
) -> float:
    """Return 1.0 when the response's number after its last ``####`` equals the answer's, else 0.0.

    ``flexible`` takes the response's last number where none is marked. Commas, a dollar sign and
    zeros behind the point do not matter. ``answer`` is a number, or a solution that ends with a
    marked one as in GSM8K (arXiv:2110.14168); ValueError where it holds neither.
    """
    solution = str(answer)
    expected = _last_match(_MARKED_NUMBER, solution)
    if expected is None and re.fullmatch(_NUMBER, solution.strip()):
        expected = solution.strip()
    if expected is None:
        raise ValueError(
            f"answer {answer!r:.200} holds no number: expected one, or '#### ' and one"
        )
    number = _last_match(_MARKED_NUMBER, response)
    if number is None and flexible:
        number = _last_match(_ANY_NUMBER, response)
    return float(number is not None and _to_decimal(number) == _to_decimal(expected))


def dapo_math(prompt: object, response: str, answer: object, **extra: object) -> float:
    r"""Return 1.0 when the response's answer is ``answer``, else -1.0 (DAPO, arXiv:2503.14476).

    The response's answer is the rest of the line after its last ``Answer:``; where that is empty or
    missing, the content of its last ``\boxed{}``. Both are compared as numbers where they are
    numbers, else as text; spaces, dollar signs, ``\text{}`` and a full stop do not matter.
    ValueError for a row without an answer.
    """
    stated = _last_match(_STATED_ANSWER, response)
    response_answer = stated if stated and stated.strip() else last_boxed(response)
    expected = _normalise(text_of(answer))
    if response_answer is None:
        return -1.0
    return 1.0 if _normalise(response_answer) == expected else -1.0


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces close, or None. Takes linear
    time.
    """
    # for each, where the content of its \boxed begins; None for a plain brace
    open_braces: list[int | None] = []
    last = (-1, "")
    for brace in _BRACE.finditer(text):
        match brace[0]:
            case "\\{" | "\\}":
                continue
            case "{":
                open_braces.append(None)
            case "}":
                begin = open_braces.pop() if open_braces else None
                if begin is not None and begin > last[0]:
                    last = (begin, text[begin : brace.start()])
            case _:
                open_braces.append(brace.end())
    return last[1] if last[0] >= 0 else None


def _last_match(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return matches[-1] if matches else None


def _to_decimal(number: str) -> Decimal:
    return Decimal(re.sub(r"[$,]", "", number))


def _normalise(text: str) -> Decimal | str:
    """Return the number that an answer is, or its text without what does not matter."""
    boxed = last_boxed(text)
    text = _TEXT_COMMAND.sub(r"\1", text if boxed is None else boxed)
    text = _NO_MEANING.sub(
        "", text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    ).rstrip(".")
    try:
        number = Decimal(_THOUSANDS_COMMA.sub("", text))
    except InvalidOperation:
        return text
    return number if number.is_finite() else text
