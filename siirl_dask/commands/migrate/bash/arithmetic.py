"""Whole numbers of a shell's ``$((1024 * 2))`` and ``((i < 3))``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_OPERATIONS: dict[type[ast.operator | ast.cmpop], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: int(left / right) if abs(left) < 2**50 else left // right,
    ast.Mod: lambda left, right: left - right * int(left / right),
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
CHANGES = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)")
"""A variable that a formula counts up or down."""
# Python's `not` takes in what follows, the shell's `!` one operand
_NEGATED = re.compile(r"\s*!\s*(\w+|\([^()]*\))\s*((&&|\|\|)\s*!?\s*(\w+|\([^()]*\))\s*)*")
_LONGEST = 1000
"""Characters of a formula: a script's are short, and this bounds what parsing takes."""


class UnknownNumber(ValueError):
    """A formula has no number: a value in it is not known, or it is not written as one."""


def calculate(formula: str, number_of: Callable[[str], int]) -> int:
    """Return the number that a formula has; ``number_of`` returns a variable's.

    UnknownNumber for anything else, a division by zero included.
    """
    if "#" in formula or CHANGES.search(formula):
        raise UnknownNumber("a number of another base, or a variable that changes")
    if "!" in formula.replace("!=", "") and not _NEGATED.fullmatch(formula):
        raise UnknownNumber("a negation within a formula")
    text = re.sub(r"!(?!=)", " not ", formula.replace("/", "//"))
    text = text.replace("&&", " and ").replace("||", " or ").strip()
    if len(text) > _LONGEST:
        raise UnknownNumber("the formula is too long")
    if not text:
        return 0
    try:
        return int(_number(ast.parse(text, mode="eval").body, number_of))
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise UnknownNumber(str(error)) from error


def _number(node: ast.expr, number_of: Callable[[str], int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return number_of(name)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, number_of)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _number(operand, number_of)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return int(not _number(operand, number_of))
        case ast.BoolOp(op=op, values=values):
            numbers = (_number(value, number_of) for value in values)
            if isinstance(op, ast.And):
                return int(all(numbers))
            return int(any(numbers))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            second = _number(right, number_of)
            if isinstance(op, (ast.LShift, ast.RShift)) and not 0 <= second < 64:
                raise UnknownNumber("a shift by more than 63")
            return _OPERATIONS[type(op)](_number(left, number_of), second)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATIONS:
            first = _number(left, number_of)
            return int(_OPERATIONS[type(op)](first, _number(right, number_of)))
    raise UnknownNumber(f"{ast.unparse(node)} is no number")
