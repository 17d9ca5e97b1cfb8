"""Rewards for mathematical answers: equal expressions, a number after ``####``, an answer after
``Answer:``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from decimal import Decimal

from siirl_dask.errors import ConfigError
from siirl_dask.rewards.written_numbers import (
    MINUS,
    decimal_of,
    has_marked_digits,
    last_number,
    marked_number,
    numbers_around,
    read_number,
    without_groups,
)
from siirl_dask.wording import value_text

_STATED = re.compile(r"\banswer[ \t*_]*:", re.IGNORECASE)
_MARKUP = "*_ \t\r"
_TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[,; ]|~")
# delimiters, bold type, quotes, degrees
_NO_MEANING = re.compile(r"\\[!()\[\]$]|\\left|\\right|\$|\*\*|__|\"|\^\{?\\circ\}?|°")
_NO_MEANING_OF_SPACE = re.compile(r"(?<!\d) | (?!\d)")
"""A space that is not between digits: 5 1/2 is not 51/2."""
_SPACED_GROUPS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_SHORT_ARGUMENT = re.compile(r"(\\frac|\\sqrt|\\frac\{[^{}]*\}) ?(\d)")
_UNIT = re.compile(
    r"(?<=\d)(?:square|cubic)?(?:degrees|units|cents|dollars|pounds|[cmk]?met(?:er|re)s|cm|mm|km|kg|"
    r"inches|feet|miles|mph|hours|minutes|seconds|days|points|ways|digits|integers)$"
)
_BRACE = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def text_of(answer: object) -> str:
    """Return an answer as a text, a Decimal without an exponent. ValueError for null, NaN, and what
    is no text and no number: no response is right or wrong there.
    """
    if answer is None:
        raise ValueError("the row's answer is null: expected one to compare with")
    if isinstance(answer, float | Decimal) and Decimal(answer).is_nan():
        raise ValueError("the row's answer is not a number (NaN): expected one to compare with")
    if isinstance(answer, Mapping | Sequence | Set | bytearray) and not isinstance(answer, str):
        raise ValueError(
            f"the row's answer is a {type(answer).__name__}, {value_text(answer):.200}: expected a "
            "text or a number; data.answer=COLUMN.FIELD names a field of a struct, and data import "
            "--column 'answer=COLUMN[0]' takes an item of a list"
        )
    if isinstance(answer, Decimal):
        return f"{answer:f}"
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
    if "$" not in text and "\\boxed" not in text:
        text = f"${text}$"
    # math-verify's timeouts use signals, which work in main threads only: rewards.timeout stands in
    # for them.
    expected = parse(text, parsing_timeout=None)
    if not expected:
        raise ValueError(f"answer {answer!r:.200} is no mathematics that math-verify can read")
    given = parse(response.replace(MINUS, "-"), parsing_timeout=None)
    if not verify(expected, given, timeout_seconds=None):
        return 0.0
    return float(last_boxed(response) is not None or not _is_part(str(given[-1]), response))


def _is_part(number: str, response: str) -> bool:
    """Return whether what math-verify took for a number is but a part of something in a response:
    the 3.14 of 3.14.15.
    """
    value = read_number(number)
    around = numbers_around(number, response)
    if value is None or not around:
        return False
    return value not in around


def gsm8k(
    prompt: object, response: str, answer: object, *, flexible: bool = False, **extra: object
) -> float:
    """Return 1.0 when the response's number after its last ``####`` equals the answer's, else 0.0.

    ``flexible`` takes the response's last number where none is marked. Dollar signs, zeros behind
    the point and commas before each three digits do not matter; of a version, a date or a fraction
    no part is a number. ``answer`` is a number, or a solution that ends with a marked one as in
    GSM8K (arXiv:2110.14168); ValueError where it holds neither.
    """
    solution = str(answer)
    expected = marked_number(solution)
    if expected is None:
        expected = read_number(solution.strip())
    if expected is None:
        raise ValueError(
            f"answer {answer!r:.200} holds no number: expected one, or '#### ' and one"
        )
    number = marked_number(response)
    if flexible and not has_marked_digits(response):
        number = last_number(response)
    return float(number == expected)


def dapo_math(prompt: object, response: str, answer: object, **extra: object) -> float:
    r"""Return 1.0 when the response's answer is ``answer``, else -1.0 (DAPO, arXiv:2503.14476).

    The response's answer is the rest of the line after its last ``Answer:``; where that is empty or
    missing, the content of its last ``\boxed{}``, or without one the next line. Both are compared
    as numbers where they are numbers, else as text. Dollar signs, quotes, bold type, ``\text{}``,
    degrees, a unit behind a number, short forms such as ``\frac12``, a full stop and spaces that
    are not between digits do not matter, nor does what comes before ``=`` where the answer has
    none. ValueError for a row without an answer.
    """
    expected = _normalise(text_of(answer))
    line, next_line = _after_mark(response)
    given = _normalise(line or last_boxed(response) or next_line)
    if isinstance(given, str) and "=" not in str(expected):
        left, _, right = without_groups(given).rpartition("=")
        if left and "," not in left + right:
            given = _normalise(right)
    if given == expected:
        return 1.0
    return -1.0


def _after_mark(response: str) -> tuple[str, str]:
    """Return the rest of the line of a response's last ``Answer:``, and the next line with words on
    it; both are "" without a mark.
    """
    end = max((found.end() for found in _STATED.finditer(response)), default=len(response))
    line, _, after = response[end:].partition("\n")
    next_line = after.lstrip(_MARKUP + "\n").partition("\n")[0]
    return line.strip(_MARKUP), next_line.rstrip(_MARKUP)


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
    if last[0] < 0:
        return None
    return last[1]


def _normalise(text: str) -> Decimal | str:
    """Return the number that an answer is, or its text without what does not matter."""
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    text = _TEXT_COMMAND.sub(r"\1", text)
    text = _LATEX_SPACE.sub(" ", text.replace("{,}", ",").replace(MINUS, "-"))
    text = _NO_MEANING.sub("", text)
    text = _NO_MEANING_OF_SPACE.sub("", " ".join(text.split())).rstrip(".")
    text = text.replace(r"\dfrac", r"\frac").replace(r"\tfrac", r"\frac")
    for _ in ("first", "second"):  # of a fraction's arguments
        text = _SHORT_ARGUMENT.sub(r"\1{\2}", text)
    text = _UNIT.sub("", text)
    if _SPACED_GROUPS.fullmatch(text):
        text = text.replace(" ", "")
    number = decimal_of(without_groups(text))
    if number is None or not number.is_finite():
        return text
    return number
