"""Decides ``[ ... ]``, ``[[ ... ]]``, ``test`` and the patterns of ``case``."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from siirl_dask.commands.migrate.bash.arithmetic import UnknownNumber
from siirl_dask.commands.migrate.bash.expansion import LITERAL, Expander
from siirl_dask.commands.migrate.bash.quoting import split_source
from siirl_dask.commands.migrate.bash.values import (
    State,
    Symbol,
    Text,
    Variable,
    Word,
    known,
    lone_symbol,
    shown,
)
from siirl_dask.errors import ConfigError

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_EQUALITIES = ("=", "==", "!=")
_PLAIN_NUMBER = re.compile(r"\s*[+-]?(0|[1-9]\d*)\s*")
_BINARY = (*_EQUALITIES, *_NUMBERS, "=~", "<", ">", "-nt", "-ot", "-ef")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\s*(\+\+|--|(?:[-+*/%]?=)(?!=))(.*)", re.DOTALL)
_COUNTED = re.compile(r"(\+\+|--)\s*([A-Za-z_]\w*)")
_WILDCARD = re.compile(r"[*?\[]")
_BEYOND_FNMATCH = re.compile(r"[@?*+!]\(|\[:")
"""Patterns of ``extglob``, and classes of letters."""


@dataclass(frozen=True, slots=True)
class _Operand:
    """One word of a test, and whether it is a pattern where it stands on the right of ``==``."""

    text: Text
    is_pattern: bool


def matches(state: State, text: Text, pattern: Text, *, is_pattern: bool, line: int) -> bool:
    """Return whether a value is another, or matches a pattern; assumed where a part is unknown."""
    left = state.assumptions.resolved(text)
    right = state.assumptions.resolved(pattern)
    value = known(left)
    wanted = known(right)
    has_wildcards = False
    if is_pattern:
        written = shown(right)
        if _BEYOND_FNMATCH.search(LITERAL.sub("", written)):
            return state.assumptions.holds(f"{shown(left)} = {written}", line)
        has_wildcards = _WILDCARD.search(LITERAL.sub("", written)) is not None
        if not has_wildcards and wanted is not None:
            wanted = LITERAL.sub(lambda match: match[0][1], wanted)
    if wanted == "*" and has_wildcards:
        return True
    if state.ignores_case and value is not None and wanted is not None:
        value = value.lower()
        wanted = wanted.lower()
    if value is not None and wanted is not None:
        pattern_text = wanted.replace("[^", "[!")
        if has_wildcards:
            return fnmatchcase(value, pattern_text)
        return value == wanted
    if state.ignores_case:
        return state.assumptions.holds(f"{shown(left)} = {shown(right)}", line)
    symbol = lone_symbol(left)
    if symbol is not None and wanted is not None and not has_wildcards:
        return state.assumptions.is_equal(symbol, wanted, line)
    other = lone_symbol(right)
    if other is not None and value is not None:
        return state.assumptions.is_equal(other, value, line)
    return state.assumptions.holds(f"{shown(left)} = {shown(right)}", line)


def test(state: State, source: str, *, splits: bool, line: int) -> bool:
    """Return whether a test holds. ``source`` is what stands between the brackets; ``splits``
    holds for ``[`` and ``test``, whose words are split as those of other commands.
    """
    expander = Expander(state, line)
    operands: list[_Operand] = []
    for token in split_source(source):
        if splits:
            operands += [_Operand(word.text, is_pattern=False) for word in expander.words(token)]
        else:
            before = None
            if operands:
                before = known(operands[-1].text)
            if before in _EQUALITIES:
                operands.append(_Operand(expander.pattern(token), is_pattern=True))
            else:
                operands.append(_Operand(expander.text(token), is_pattern=False))
    return _Test(state, operands, " ".join(source.split()), line, calculates=not splits).result()


class _Test:
    """Evaluates the words of one test, by recursive descent."""

    def __init__(
        self,
        state: State,
        operands: Sequence[_Operand],
        source: str,
        line: int,
        *,
        calculates: bool,
    ) -> None:
        self._calculates = calculates
        self._state = state
        self._operands = operands
        self._source = source
        self._line = line
        self._place = 0

    def result(self) -> bool:
        """Return whether the test holds. ConfigError for one that bash would not read either."""
        if not self._operands:
            return False
        holds = self._any()
        if self._place != len(self._operands):
            raise ConfigError(f"line {self._line}: the test `{self._source}` cannot be read")
        return holds

    def _word(self, ahead: int = 0) -> str | None:
        place = self._place + ahead
        if place >= len(self._operands):
            return None
        return known(self._operands[place].text)

    def _any(self) -> bool:
        holds = self._all()
        while self._word() in ("||", "-o") and self._place < len(self._operands):
            self._place += 1
            other = self._all()
            if not holds:
                holds = other
        return holds

    def _all(self) -> bool:
        holds = self._one()
        while self._word() in ("&&", "-a") and self._place < len(self._operands):
            self._place += 1
            other = self._one()
            if holds:
                holds = other
        return holds

    def _one(self) -> bool:
        if self._word() == "!" and self._place + 1 < len(self._operands):
            self._place += 1
            return not self._one()
        if self._word() == "(" and self._word(1) not in _BINARY:
            self._place += 1
            holds = self._any()
            self._place += 1
            return holds
        return self._primary()

    def _take(self) -> _Operand:
        if self._place >= len(self._operands):
            raise ConfigError(f"line {self._line}: the test `{self._source}` cannot be read")
        self._place += 1
        return self._operands[self._place - 1]

    def _primary(self) -> bool:
        operation = None
        if self._place + 2 < len(self._operands):
            operation = self._word(1)
        first = self._take()
        if operation in _BINARY:
            chosen = known(self._take().text)
            return self._compare(first, str(chosen), self._take())
        flag = known(first.text)
        is_unary = False
        if flag is not None:
            is_unary = re.fullmatch(r"-[a-zA-Z]", flag) is not None
        if is_unary and self._place < len(self._operands) and self._word() not in ("&&", "||"):
            return self._check(str(flag), self._take())
        return not self._is_empty(first.text)

    def _is_empty(self, text: Text) -> bool:
        value = self._state.assumptions.resolved(text)
        if any(isinstance(piece, str) for piece in value) or not value:
            return not value
        symbol = lone_symbol(value)
        if symbol is not None:
            return self._state.assumptions.is_equal(symbol, "", self._line)
        return self._state.assumptions.holds(f"-z {shown(value)}", self._line)

    def _check(self, flag: str, operand: _Operand) -> bool:
        name = known(operand.text)
        if flag == "-z":
            return self._is_empty(operand.text)
        if flag == "-n":
            return not self._is_empty(operand.text)
        if flag == "-v" and name is not None and re.fullmatch(r"\w+", name):
            if name in self._state.variables or name in self._state.unset:
                return name in self._state.variables
            symbol = Symbol(f"${name}", self._line, environment=name, variable=name)
            return not self._state.assumptions.is_equal(symbol, "", self._line)
        return self._state.assumptions.holds(f"[ {flag} {shown(operand.text)} ]", self._line)

    def _compare(self, left: _Operand, operation: str, right: _Operand) -> bool:
        if operation in _EQUALITIES:
            is_same = matches(
                self._state,
                left.text,
                right.text,
                is_pattern=right.is_pattern,
                line=self._line,
            )
            return is_same != (operation == "!=")
        first = known(self._state.assumptions.resolved(left.text))
        second = known(self._state.assumptions.resolved(right.text))
        if first is None or second is None:
            text = f"{shown(left.text)} {operation} {shown(right.text)}"
            return self._state.assumptions.holds(text, self._line)
        if operation in _NUMBERS:
            return self._compare_numbers(first, operation, second)
        if operation == "<":
            return first < second
        if operation == ">":
            return first > second
        return self._state.assumptions.holds(f"{first} {operation} {second}", self._line)

    def _compare_numbers(self, first: str, operation: str, second: str) -> bool:
        if all(_PLAIN_NUMBER.fullmatch(value) for value in (first, second)):
            return _NUMBERS[operation](int(first), int(second))
        if not self._calculates:
            return False  # `[` says that a number is expected
        expander = Expander(self._state, self._line)
        try:
            return _NUMBERS[operation](expander.number(first), expander.number(second))
        except UnknownNumber:
            return self._state.assumptions.holds(f"{first} {operation} {second}", self._line)


def case_matches(state: State, text: Text, pattern: str, line: int) -> bool:
    """Return whether a value matches one pattern of a ``case``, as the script writes it."""
    wanted = Expander(state, line).pattern(pattern)
    return matches(state, text, wanted, is_pattern=True, line=line)


def arithmetic_command(state: State, source: str, line: int) -> bool | None:
    """Run ``((source))``, which may assign; return whether its number is not 0, None where that
    is not known.
    """
    source = source.strip()
    counted = _COUNTED.fullmatch(source)
    if counted is not None:
        source = f"{counted[2]}{counted[1]}"
    match = _ASSIGNED.fullmatch(source)
    expander = Expander(state, line)
    if match is None:
        expander.forget_changed(source)
        try:
            return expander.number(source) != 0
        except UnknownNumber:
            return state.assumptions.holds(f"(({source}))", line)
    name, operation, rest = match.groups()
    operand = rest.strip()
    if not operand:
        operand = "1"
    formula = rest
    if operation != "=":
        formula = f"{name} {operation[0]} ({operand})"
    expander.forget_changed(rest)
    try:
        text = (str(expander.number(formula)),)
    except UnknownNumber:
        state.assign(name, Variable((Word((Symbol(f"(({source}))", line),), line),)))
        return None
    state.assign(name, Variable((Word(text, line),)))
    return text != ("0",)
