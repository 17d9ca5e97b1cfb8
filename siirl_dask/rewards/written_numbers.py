"""Numbers as texts write them: whole ones, and never a part of a version, a date or a fraction."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

MINUS = "\u2212"
"""The sign of typeset text, which is not the one of keyboards."""
_GROUPED = re.compile(r"(?<![\d.,])(?!0)\d{1,3}(?:,\d{3})+(?![\d,])")
"""A whole number with a comma before each three of its digits."""
_SIGN = r"[-+\u2212]"
_DIGITS = r"(?:(?!0)\d{1,3}(?:,\d{3})+|\d+)"
_POWER = rf"(?:[eE]{_SIGN}?\d{{1,4}})?"
_ONE_NUMBER = re.compile(rf"\$*{_SIGN}?\$*(?:{_DIGITS}(?:\.\d+)?|\.\d+){_POWER}")
_SPACE = r"[ \t\xa0\u2009\u202f]"
_DASHES = r"\u2212\u2013\u2014-"
_OPERATORS = r"/*^\u00d7\u00f7\u00b7\u2044\u2215"  # times, divided by, dot, slashes of fractions
_SEPARATORS = r".,:_'{}\u2019\u066b\u066c"  # the last three: of thousands, of Arabic digits
_JOINTS = (
    rf"[{_SEPARATORS}{_OPERATORS}+{_DASHES}]+",  # 1.2.3, 10:30, 2024-01-02, 1/2, 10^{3}
    rf"{_SPACE}+",  # 5 1/2
    rf"{_SPACE}*(?:[{_OPERATORS}]|\\times|\\cdot){_SPACE}*",
    r"[^\W\d_]+",  # 0x1, 1e3
    rf"[eE]{_SIGN}",
)
"""Patterns between digits that make one expression of those before and behind."""
_JOINED = "|".join(rf"{joint}\d+" for joint in _JOINTS)
_EXPRESSION = rf"(?<![\w.$+{_DASHES}])[$.+{_DASHES}]*\d+(?:{_JOINED})*"
_ANYWHERE = re.compile(_EXPRESSION)
_MARKED = re.compile(rf"####\s*(?P<expression>{_EXPRESSION})")


def decimal_of(text: str) -> Decimal | None:
    """Return the number that a whole text is, without commas; None for any other text, as for
    ``101_2``, in which Python alone sees a number.
    """
    if "_" in text:
        return None
    try:
        return Decimal(text.replace(MINUS, "-"))
    except InvalidOperation:
        return None


def without_groups(text: str) -> str:
    """Return a text without the commas in whole numbers of which each stands before three digits:
    ``1,000``, and not ``1,23``.
    """
    return _GROUPED.sub(lambda found: found[0].replace(",", ""), text)


def read_number(text: str) -> Decimal | None:
    """Return the number that a whole text is: with a sign, dollars, commas before each three
    digits, a power of ten behind ``e``. None for any other text.
    """
    if _ONE_NUMBER.fullmatch(text) is None:
        return None
    return decimal_of(re.sub(r"[$,]", "", text))


def marked_number(text: str) -> Decimal | None:
    """Return the number behind a text's last ``####`` that has digits behind it, without its
    commas. None without one, or where they are part of something else.

    GSM8K's own scoring leaves out every comma, in whatever groups: 1,00,000 is 100000. One number
    is marked, so that a comma never stands between two.
    """
    marked = [*_MARKED.finditer(text)]
    if not marked:
        return None
    begin, end = marked[-1].span("expression")
    return _number_of((begin, end), text, text[begin:end].replace(",", ""))


def has_marked_digits(text: str) -> bool:
    """Return whether digits stand behind a ``####`` of a text, a number or not."""
    return _MARKED.search(text) is not None


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; None without one."""
    for found in reversed([*_ANYWHERE.finditer(text)]):
        number = _number_of(found.span(), text)
        if number is not None:
            return number
    return None


def numbers_around(part: str, text: str) -> list[Decimal | None]:
    """Return, of each expression of a text's that ``part`` occurs in, the number that it is or
    None.
    """
    expressions = [found for found in _ANYWHERE.finditer(text) if part in found[0]]
    return [_number_of(found.span(), text) for found in expressions]


def _number_of(span: tuple[int, int], text: str, expression: str | None = None) -> Decimal | None:
    """Return the number that an expression at ``span`` of a text is, None where it is none;
    ``expression`` is what stands there in another form.
    """
    begin, end = span
    behind = text[end : end + 1]
    if behind.isnumeric() or behind in {"⁺", "⁻"}:  # 5², 2½, 10⁻¹
        return None
    if expression is None:
        expression = text[begin:end]
    return read_number(expression)
