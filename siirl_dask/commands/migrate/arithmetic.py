"""Whole numbers of a shell's ``$((1024 * 2))``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(formula: str, known: Mapping[str, str]) -> str:
    """Return the number that a formula makes of the variables; "" where one is not known, or it
    is no formula.
    """
    try:
        tree = ast.parse(
            re.sub(r"\\?\$\{?(\w+)\}?", r"\1", formula).replace("/", "//").strip(), mode="eval"
        )
        return str(_number(tree.body, known))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return ""


def _number(node: ast.expr, known: Mapping[str, str]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return int(known[name])
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return _OPERATIONS[type(op)](_number(left, known), _number(right, known))
    raise ValueError(ast.dump(node))
