"""Values of a script's variables: text, with parts that the script alone does not tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Symbol:
    """A part of a value that the script alone does not tell."""

    source: str
    """Text of the script that has this value, such as ``$(date +%s)`` or ``$HOME``."""
    line: int
    environment: str = ""
    """The environment variable whose value it is; "" for what a command prints."""
    variable: str = ""
    """Name by which the user can give the value; "" where no variable has it alone."""

    @property
    def key(self) -> str:
        """Identity: all places where an environment variable is read have the same value."""
        if self.environment:
            return self.environment
        return f"{self.source} (line {self.line})"


Text = tuple[str | Symbol, ...]
"""Text in pieces; no two strings are neighbours, and no string is empty."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command, quotes removed."""

    text: Text
    line: int
    """Line where the value was assigned, or that of the command itself."""


@dataclass(slots=True)
class Variable:
    """A variable that is set: one word, or the elements of an array."""

    words: tuple[Word, ...]
    is_array: bool = False


def joined(pieces: Iterable[str | Symbol]) -> Text:
    """Return pieces as text: neighbouring strings are one, empty ones are left out."""
    text: list[str | Symbol] = []
    for piece in pieces:
        if isinstance(piece, str) and text and isinstance(text[-1], str):
            text[-1] += piece
        elif piece != "":
            text.append(piece)
    return tuple(text)


def known(text: Text) -> str | None:
    """Return text without symbols; None where it has one."""
    strings = [piece for piece in text if isinstance(piece, str)]
    if len(strings) < len(text):
        return None
    return "".join(strings)


def shown(text: Text) -> str:
    """Return text for a message, with symbols as the script writes them."""
    return "".join(piece if isinstance(piece, str) else piece.source for piece in text)


def lone_symbol(text: Text) -> Symbol | None:
    """Return the symbol that a text is; None for any other text."""
    if len(text) == 1 and isinstance(text[0], Symbol):
        return text[0]
    return None


@dataclass(frozen=True, slots=True)
class Decision:
    """One question that the script alone does not answer, and the answer that is assumed."""

    subject: str
    """The symbol's key or the condition's text: decisions on one subject are about one thing."""
    line: int
    """Line of the condition."""
    answer: bool
    symbol: Symbol | None = None
    literal: str = ""
    """With a symbol: whether it has this value."""


@dataclass(slots=True)
class Assumptions:
    """One way through a script: the answers that are assumed where the script tells none.

    The first questions get the answers of ``prefix``, all others True.
    """

    prefix: Sequence[bool] = ()
    decisions: list[Decision] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """Assumed values, by the symbols' keys."""
    _others: dict[str, set[str]] = field(default_factory=dict)
    _conditions: dict[str, bool] = field(default_factory=dict)

    def is_equal(self, symbol: Symbol, literal: str, line: int) -> bool:
        """Return whether a symbol has this value under these assumptions."""
        if symbol.key in self.values:
            return self.values[symbol.key] == literal
        others = self._others.setdefault(symbol.key, set())
        if literal in others:
            return False
        answer = self._next()
        self.decisions.append(Decision(symbol.key, line, answer, symbol, literal))
        if answer:
            self.values[symbol.key] = literal
        else:
            others.add(literal)
        return answer

    def holds(self, condition: str, line: int) -> bool:
        """Return whether a condition holds under these assumptions that is about more than one value."""
        text = " ".join(condition.split())
        if text not in self._conditions:
            self._conditions[text] = self._next()
            self.decisions.append(Decision(text, line, self._conditions[text]))
        return self._conditions[text]

    def _next(self) -> bool:
        place = len(self.decisions)
        if place < len(self.prefix):
            return self.prefix[place]
        return True

    def resolved(self, text: Text) -> Text:
        """Return text with the assumed values in place of their symbols."""
        return joined(
            self.values.get(piece.key, piece) if isinstance(piece, Symbol) else piece
            for piece in text
        )

    def label(self, subject: str) -> str:
        """Return what is assumed of a subject, for a message; "" for one that never came up."""
        about = [decision for decision in self.decisions if decision.subject == subject]
        if not about:
            return ""
        symbol = about[0].symbol
        if symbol is None:
            if about[0].answer:
                return f"`{subject}` holds"
            return f"`{subject}` does not hold"
        name = symbol.source
        if symbol.variable:
            name = symbol.variable
        if symbol.key in self.values:
            return f"{name}={self.values[symbol.key]}"
        others = " or ".join(f"{name}={one.literal}" for one in about)
        if len(about) > 1:
            return f"neither {others}"
        return f"not {others}"


@dataclass(slots=True)
class State:
    """Variables of a running script."""

    given: frozenset[str]
    """Names of the variables that the user gave; the script's own assignments do not count."""
    assumptions: Assumptions
    variables: dict[str, Variable] = field(default_factory=dict)
    unset: set[str] = field(default_factory=set)
    """Variables that the script itself removed: they are empty, not unknown."""
    positional: tuple[Word, ...] = ()
    ignores_case: bool = False
    """Whether patterns match letters of the other case: ``shopt -s nocasematch``."""

    def assign(self, name: str, variable: Variable) -> None:
        """Set a variable, unless the user gave it."""
        if name in self.given:
            return
        if not variable.is_array:
            (word,) = variable.words
            symbol = lone_symbol(word.text)
            if symbol is not None and not symbol.variable:
                named = replace(symbol, variable=name)
                variable = Variable((Word((named,), word.line),))
        self.variables[name] = variable
        self.unset.discard(name)

    def remove(self, name: str) -> None:
        """Unset a variable."""
        if name not in self.given:
            self.variables.pop(name, None)
            self.unset.add(name)
