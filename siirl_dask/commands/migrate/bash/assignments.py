"""Follows what sets a script's variables: assignments, declarations, and calls of its functions, which
have variables of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tree_sitter import Node

from siirl_dask.commands.migrate.bash.expansion import Expander
from siirl_dask.commands.migrate.bash.quoting import split_source
from siirl_dask.commands.migrate.bash.tree import line_of, text_of, text_without, value_after
from siirl_dask.commands.migrate.bash.values import State, Symbol, Variable, Word, joined
from siirl_dask.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
"""Name, ``+`` where the value is appended, and value."""
_CHANGING_FLAGS = frozenset("ilnuA")
"""Flags of ``declare`` by which a variable is something else than the text that it is given."""
_NUMBERED = re.compile(r"\[[^\]]*\]\+?=")


class Assignments:
    """Sets the variables of ``state``; ``notes`` get sentences on what is not followed."""

    def __init__(self, state: State, notes: list[str]) -> None:
        self._state = state
        self._notes = notes
        self._locals: list[dict[str, tuple[Variable | None, bool]]] = []

    @property
    def depth(self) -> int:
        """Functions that are under way, each called by the one before."""
        return len(self._locals)

    @contextmanager
    def of_function(self, arguments: Sequence[Word]) -> Iterator[None]:
        """Have the arguments of a function inside the ``with`` block; afterwards those of its
        caller, and its caller's variables where it had local ones.
        """
        outer = self._state.positional
        self._state.positional = tuple(arguments)
        self._locals.append({})
        try:
            yield
        finally:
            self._state.positional = outer
            for name, (before, was_unset) in self._locals.pop().items():
                if before is None:
                    self._state.variables.pop(name, None)
                else:
                    self._state.variables[name] = before
                self._state.unset.discard(name)
                if was_unset:
                    self._state.unset.add(name)

    def assign(self, node: Node) -> None:
        """Follow an assignment."""
        target = node.child_by_field_name("name")
        value = node.child_by_field_name("value")
        assert target is not None
        line = line_of(node)
        if target.type == "subscript":
            self._set_elements_unknown(text_of(target).partition("[")[0], line)
            return
        name = text_of(target)
        appends = any(child.type == "+=" for child in node.children)
        before = None
        if appends:
            before = self._state.variables.get(name)
        if value is not None and value.type == "array":
            inside = text_without(value, ("comment",)).strip()[1:-1]
            tokens = split_source(inside)
            if any(_NUMBERED.match(token) for token in tokens):
                self._set_elements_unknown(name, line)
                return
            words = [word for token in tokens for word in self._expander(node).words(token)]
            if before is not None:
                words = [*before.words, *words]
            self._state.assign(name, Variable(tuple(words), is_array=True))
            return
        self.set_text(name, value_after(node, target, appends), line, appends=appends)

    def set_text(self, name: str, source: str, line: int, *, appends: bool) -> None:
        """Set a variable to what its right side becomes, or append that to it."""
        text = Expander(self._state, line).text(source)
        if name == "IFS":
            self._notes.append(f"line {line}: IFS is set, and words are split at white space here")
        before = None
        if appends:
            before = self._state.variables.get(name)
        if before is not None and before.words:
            text = joined([*before.words[0].text, *text])
        self._state.assign(name, Variable((Word(text, line),)))

    def _set_elements_unknown(self, name: str, line: int) -> None:
        unread = Symbol(f"${{{name}[@]}}", line, variable=name)
        self._state.assign(name, Variable((Word((unread,), line),), is_array=True))

    def unset(self, name: str, line: int) -> None:
        """Remove a variable, or an element of one."""
        if "[" in name:
            self._set_elements_unknown(name.partition("[")[0], line)
        else:
            self._state.remove(name)

    def declare(self, node: Node) -> None:
        """Follow ``export``, ``declare``, ``local`` and the like."""
        flags = {
            letter
            for child in node.named_children
            if child.type == "word" and text_of(child).startswith("-")
            for letter in text_of(child)[1:]
        }
        is_local = False
        if node.children[0].type in ("local", "declare", "typeset") and "g" not in flags:
            is_local = bool(self._locals)
        line = line_of(node)
        # bash expands all words before it assigns any of them
        assigned: list[tuple[str, Variable]] = []
        for child in node.named_children:
            target = child.child_by_field_name("name")
            name = text_of(child)
            if target is not None:
                name = text_of(target)
            if child.type in ("string", "raw_string", "concatenation"):
                assigned += self._declared_in_quotes(child)
                continue
            if child.type not in ("variable_assignment", "variable_name"):
                continue
            if is_local and name not in self._locals[-1]:
                before = self._state.variables.get(name)
                self._locals[-1][name] = (before, name in self._state.unset)
            value = child.child_by_field_name("value")
            is_array = False
            if value is not None:
                is_array = value.type == "array"
            appends = any(one.type == "+=" for one in child.children)
            if child.type == "variable_name":
                if is_local:
                    self._state.remove(name)
            elif not flags.isdisjoint(_CHANGING_FLAGS):
                symbol = Symbol(" ".join(text_of(node).split()), line, variable=name)
                assigned.append((name, Variable((Word((symbol,), line),))))
            elif not is_array and not appends and target is not None:
                text = self._expander(child).text(value_after(child, target, False))
                assigned.append((name, Variable((Word(text, line_of(child)),))))
            else:
                self.assign(child)
        for name, variable in assigned:
            self._state.assign(name, variable)

    def _declared_in_quotes(self, node: Node) -> list[tuple[str, Variable]]:
        """Return what ``export "X=1"`` assigns."""
        found: list[tuple[str, Variable]] = []
        line = line_of(node)
        for word in self._expander(node).words(text_of(node)):
            text = word.text
            first = ""
            if text and isinstance(text[0], str):
                first = text[0]
            match = ASSIGNMENT.fullmatch(first)
            if match is None or match[2]:
                shown_text = " ".join(text_of(node).split())
                raise ConfigError(f"line {line}: what `{shown_text}` declares cannot be read")
            found.append((match[1], Variable((Word(joined([match[3], *text[1:]]), line),))))
        return found

    def set_unknown(self, name: str | None, source: str, line: int) -> None:
        """Set a variable to what a command gives, of which ``source`` is the text."""
        if name is not None and re.fullmatch(r"[A-Za-z_]\w*", name):
            symbol = Symbol(" ".join(source.split()), line, variable=name)
            self._state.assign(name, Variable((Word((symbol,), line),)))

    def _expander(self, node: Node) -> Expander:
        return Expander(self._state, line_of(node))
