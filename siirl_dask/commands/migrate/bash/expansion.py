"""Expands the words of a script as bash does: quotes, variables, arrays, defaults, splitting."""

from __future__ import annotations

import re

from siirl_dask.commands.migrate.bash.arithmetic import CHANGES, UnknownNumber, calculate
from siirl_dask.commands.migrate.bash.fields import Fields
from siirl_dask.commands.migrate.bash.quoting import (
    after_bracket,
    after_piece,
    after_quote,
    after_single_quote,
    split_at,
)
from siirl_dask.commands.migrate.bash.substitution import anchored, replaced, trimmed
from siirl_dask.commands.migrate.bash.values import (
    State,
    Symbol,
    Text,
    Variable,
    Word,
    joined,
    known,
    lone_symbol,
)

_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(
    r"(?P<prefix>[#!]?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?"
    r"(?P<operator>:?[-=+?]|##?|%%?|//?|\^\^?|,,?|:|@)?(?P<rest>.*)",
    re.DOTALL,
)
LITERAL = re.compile(r"\[[*?\[]\]")
"""A letter of a pattern that stood in quotes, as ``Expander.pattern`` writes it."""
_PIECES_IN_QUOTES = re.compile(
    r"\\.|'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{[^}]*\}|\$\([^)]*\)", re.DOTALL
)
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
_PLAIN = re.compile(r"[^\s$`\\\"']+")
_PLAIN_IN_QUOTES = re.compile(r"[^$`\\\"]+")
_ESCAPED_IN_QUOTES = '$`"\\\n'
_DEEPEST = 20
"""Steps from one variable to the next within a formula."""


class Expander:
    """Expands text of one line of a script."""

    def __init__(self, state: State, line: int) -> None:
        self._state = state
        self._line = line

    def words(self, source: str) -> list[Word]:
        """Return the words that one word of a command becomes: none, one or several."""
        if _BRACES.search(_PIECES_IN_QUOTES.sub("", source)):
            return [Word((Symbol(source, self._line),), self._line)]
        fields = Fields(self._line, splits=True)
        self._scan(source, fields, in_quotes=False)
        fields.end()
        return fields.words

    def text(self, source: str) -> Text:
        """Return the text that the right side of an assignment becomes: it is not split."""
        fields = Fields(self._line, splits=False)
        self._scan(source, fields, in_quotes=False)
        return self._one_text(fields)

    def pattern(self, source: str) -> Text:
        """Return the pattern that a word becomes: quoted letters stand for themselves in it, as
        ``LITERAL`` finds them.
        """
        fields = Fields(self._line, splits=False, is_pattern=True)
        self._scan(source, fields, in_quotes=False)
        return self._one_text(fields)

    def quoted(self, source: str) -> Text:
        """Return text as if it stood in double quotes."""
        fields = Fields(self._line, splits=False)
        self._scan(source, fields, in_quotes=True)
        return self._one_text(fields)

    def _one_text(self, fields: Fields) -> Text:
        """Return the words of fields as one text; there are several where an array is in it."""
        fields.end()
        pieces = [piece for word in fields.words for piece in (" ", *word.text)]
        return self._resolved(joined(pieces[1:]))

    def number(self, formula: str) -> int:
        """Return the number of a formula. UnknownNumber where it has none."""
        text = known(self.quoted(formula))
        if text is None:
            raise UnknownNumber("a value in it is not known")
        return calculate(text, self._number_of)

    def forget_changed(self, formula: str) -> None:
        """Take variables that a formula counts up or down for unknown from here on."""
        for match in CHANGES.finditer(formula):
            name = match[1]
            if not name:
                name = match[2]
            symbol = Symbol(f"(({formula.strip()}))", self._line)
            self._state.assign(name, Variable((Word((symbol,), self._line),)))

    def _number_of(self, name: str, depth: int = 0) -> int:
        variable = self._state.variables.get(name)
        if variable is None and name in self._state.unset:
            return 0
        if variable is None or not variable.words or depth > _DEEPEST:
            raise UnknownNumber(f"{name} is not set")
        text = known(self._resolved(variable.words[0].text))
        if text is None:
            raise UnknownNumber(f"{name} is not known")
        return calculate(text, lambda other: self._number_of(other, depth + 1))

    def _resolved(self, text: Text) -> Text:
        return self._state.assumptions.resolved(text)

    def _scan(self, source: str, fields: Fields, *, in_quotes: bool) -> None:
        """Add what ``source`` stands for to the fields."""
        place = 0
        if not in_quotes and re.match(r"~(/|$)", source) and not fields.is_open:
            fields.add((self._environment("HOME"),), quoted=True)
            place = 1
        while place < len(source):
            letter = source[place]
            if letter == "$" or letter == "`":
                place = self._reference(source, place, fields, quoted=in_quotes)
            elif letter == "\\":
                place = self._escape(source, place, fields, in_quotes=in_quotes)
            elif letter == '"' and in_quotes:
                place += 1
            elif letter == '"':
                end = after_quote(source, place)
                self._in_quotes(source[place + 1 : end - 1], fields)
                place = end
            elif letter == "'" and not in_quotes:
                end = after_single_quote(source, place)
                fields.add(joined([source[place + 1 : end - 1]]), quoted=True)
                place = end
            elif letter.isspace() and not in_quotes:
                fields.add((letter,), quoted=False)
                place += 1
            else:
                plain = _PLAIN
                if in_quotes:
                    plain = _PLAIN_IN_QUOTES
                run = plain.match(source, place)
                text = letter
                if run is not None:
                    text = run[0]
                if in_quotes:
                    fields.add((text,), quoted=True)
                else:
                    fields.add_plain(text)
                place += len(text)

    def _in_quotes(self, inside: str, fields: Fields) -> None:
        fields.has_no_elements = False
        self._scan(inside, fields, in_quotes=True)
        # "${A[@]}" of an empty array is no word; any other string in quotes is one
        if not fields.has_no_elements:
            fields.add((), quoted=True)

    def _escape(self, source: str, place: int, fields: Fields, *, in_quotes: bool) -> int:
        following = source[place + 1 : place + 2]
        if following != "\n":
            if in_quotes and following not in _ESCAPED_IN_QUOTES:
                following = f"\\{following}"
            fields.add(joined([following]), quoted=True)
        return place + 2

    def _reference(self, source: str, place: int, fields: Fields, *, quoted: bool) -> int:
        """Add what the reference at ``place`` stands for, and return the place after it."""
        following = source[place + 1 : place + 2]
        if source[place] == "`" or following == "(":
            end = after_piece(source, place)
            inside = source[place:end]
            if inside.startswith("$((") and inside.endswith("))"):
                fields.add(self._sum(inside), quoted=quoted)
            else:
                fields.add((Symbol(" ".join(inside.split()), self._line),), quoted=quoted)
            return end
        if following == "{":
            end = after_bracket(source, place + 1)
            self._parameter(source[place + 2 : end - 1], fields, quoted=quoted)
            return end
        if following == "'" and not quoted:
            end = after_single_quote(source, place + 1)
            text = source[place + 2 : end - 1]
            if re.search(r"\\[^nt\\'\"]", text):
                fields.add((Symbol(source[place:end], self._line),), quoted=True)
                return end
            for code, letter in (("\\n", "\n"), ("\\t", "\t"), ("\\\\", "\\")):
                text = text.replace(code, letter)
            fields.add(joined([text]), quoted=True)
            return end
        if following == '"' and not quoted:
            return place + 1
        if following == "[":
            end = source.find("]", place)
            if end < 0:
                end = len(source)
            else:
                end += 1
            fields.add((Symbol(source[place:end], self._line),), quoted=quoted)
            return end
        name = _NAME.match(source, place + 1)
        if name is not None:
            self._parameter(name[0], fields, quoted=quoted)
            return name.end()
        if following and following in "@*#?$!-0123456789":
            self._parameter(following, fields, quoted=quoted)
            return place + 2
        fields.add(("$",), quoted=True)
        return place + 1

    def _sum(self, source: str) -> Text:
        self.forget_changed(source)
        try:
            return (str(self.number(source[3:-2])),)
        except UnknownNumber:
            return (Symbol(source, self._line),)

    def _environment(self, name: str) -> Symbol:
        return Symbol(f"${name}", self._line, environment=name, variable=name)

    def _values(self, name: str, index: str | None) -> tuple[Word, ...] | None:
        """Return the words of a variable or of some of its elements; None where it is not set."""
        if name in ("@", "*"):
            return self._state.positional
        if name == "#":
            return (Word((str(len(self._state.positional)),), self._line),)
        if name.isdigit() and name != "0":
            place = int(name) - 1
            return _present(self._state.positional[place : place + 1])
        if not _NAME.fullmatch(name):
            return (Word((Symbol(f"${name}", self._line),), self._line),)
        variable = self._state.variables.get(name)
        if variable is None:
            return None
        if index in ("@", "*"):
            return variable.words
        if not variable.is_array and index is None:
            return variable.words
        place = 0
        try:
            if index is not None:
                place = self.number(index)
        except UnknownNumber:
            return (Word((Symbol(f"${{{name}[{index}]}}", self._line),), self._line),)
        first = None
        if variable.words:
            first = lone_symbol(variable.words[0].text)
        if first is not None and first.source == f"${{{name}[@]}}":
            return variable.words  # elements were set one by one, and are not known
        if place < 0:
            place += len(variable.words)
        if place < 0:
            return ()
        return variable.words[place : place + 1]

    def _parameter(self, body: str, fields: Fields, *, quoted: bool) -> None:
        """Add the value of ``${body}``."""
        match = _PARAMETER.fullmatch(body)
        if match is None:
            fields.add((Symbol(f"${{{body}}}", self._line),), quoted=quoted)
            return
        name = match["name"]
        index = match["index"]
        operator = match["operator"]
        if not operator:
            operator = ""
        words = self._values(name, index)
        is_list = not {"@", "*"}.isdisjoint((name, index))
        if match["prefix"] or (match["rest"] and not operator):
            fields.add(self._special(body, match, words), quoted=quoted)
            return
        if operator.lstrip(":") in ("-", "=", "+", "?") and operator:
            if self._is_missing(words, or_empty=operator.startswith(":")):
                self._without(name, operator, match["rest"], fields, quoted=quoted)
                return
            if operator.endswith("+"):
                self._scan(match["rest"], fields, in_quotes=quoted)
                return
            operator = ""
        if words is None and not is_list and not operator and _NAME.fullmatch(name):
            if name not in self._state.unset:
                fields.add((self._environment(name),), quoted=quoted)
            return
        elements = []
        if words is not None:
            elements = [*words]
        if operator == ":" and is_list:
            elements = self._slice(elements, body, match["rest"], counts_name=name in ("@", "*"))
        elif operator:
            elements = [
                Word(self._changed(word.text, body, operator, match["rest"]), word.line)
                for word in elements
            ]
        if quoted and "*" in (name, index) and elements:
            # "${A[*]}" is one word
            spaced = [piece for word in elements for piece in (" ", *word.text)][1:]
            elements = [Word(joined(spaced), elements[0].line)]
        self._add_elements(elements, fields, quoted=quoted, is_list=is_list)

    def _slice(
        self,
        elements: list[Word],
        body: str,
        rest: str,
        *,
        counts_name: bool,
    ) -> list[Word]:
        """Return some elements of a list. Of the positional ones, number 0 is the script's name."""
        first, _, length = rest.partition(":")
        try:
            start = self.number(first)
            count = None
            if length.strip():
                count = self.number(length)
        except UnknownNumber:
            return [Word((Symbol(f"${{{body}}}", self._line),), self._line)]
        size = len(elements) + counts_name
        if start < 0:
            start += size
        if start < 0 or (count is not None and count < 0) or (counts_name and start == 0):
            return [Word((Symbol(f"${{{body}}}", self._line),), self._line)]
        chosen = elements[start - counts_name :]
        if count is None:
            return chosen
        return chosen[:count]

    def _add_elements(
        self, elements: list[Word], fields: Fields, *, quoted: bool, is_list: bool
    ) -> None:
        if is_list and not elements and not fields.is_open:
            fields.has_no_elements = True
        for place, word in enumerate(elements):
            if place:
                fields.end()
            fields.add(self._resolved(word.text), quoted=quoted, line=word.line)

    def _is_missing(self, words: tuple[Word, ...] | None, *, or_empty: bool) -> bool:
        if not words or not or_empty:
            return not words
        text = self._resolved(words[0].text)
        if len(text) == 1 and isinstance(text[0], Symbol) and text[0].environment:
            return self._state.assumptions.is_equal(text[0], "", self._line)
        return not text

    def _without(
        self, name: str, operator: str, rest: str, fields: Fields, *, quoted: bool
    ) -> None:
        """Add what stands in for a variable that is not set."""
        match operator.lstrip(":"):
            case "?":
                fields.add((self._environment(name),), quoted=quoted)
            case "-":
                self._scan(rest, fields, in_quotes=quoted)
            case "=":
                text = self.quoted(rest) if quoted else self.text(rest)
                self._state.assign(name, Variable((Word(text, self._line),)))
                fields.add(text, quoted=quoted)

    def _special(self, body: str, match: re.Match[str], words: tuple[Word, ...] | None) -> Text:
        """Return a length, or the value of the variable that a variable names."""
        unread = (Symbol(f"${{{body}}}", self._line),)
        if match["operator"] or match["rest"] or words is None:
            return unread
        of_all = not {"@", "*"}.isdisjoint((match["index"], match["name"]))
        if not words and (match["prefix"] != "#" or not of_all):
            return unread
        texts = [known(self._resolved(word.text)) for word in words]
        if match["prefix"] == "#":
            if match["index"] in ("@", "*") or match["name"] in ("@", "*"):
                return (str(len(texts)),)
            if texts[0] is None:
                return unread
            return (str(len(texts[0])),)
        if match["prefix"] == "!" and texts[0] is not None and _NAME.fullmatch(texts[0]):
            return self.quoted("${" + texts[0] + "}")
        return unread

    def _changed(self, text: Text, body: str, operator: str, rest: str) -> Text:
        """Return a value without a prefix or suffix, with a part replaced, or in another case."""
        value = known(self._resolved(text))
        parts = [rest]
        if operator.startswith("/"):
            parts = split_at(rest, "/")
        anchor = ""
        if operator == "/" and parts[0][:1] in ("#", "%"):
            anchor = parts[0][:1]
        argument = known(self.pattern(parts[0].removeprefix(anchor)))
        replacement = known(self.text("/".join(parts[1:])))
        unread = (Symbol(f"${{{body}}}", self._line),)
        if value is None or argument is None or replacement is None or "[:" in argument:
            return unread
        argument = argument.replace("[^", "[!")
        if anchor:
            return joined([anchored(value, anchor, argument, replacement)])
        if operator in ("^^", ",,", "^", ",") and argument:
            return unread
        match operator:
            case "#" | "##" | "%" | "%%":
                return joined([trimmed(value, operator, argument)])
            case "/" | "//":
                everywhere = operator == "//"
                return joined([replaced(value, argument, replacement, everywhere=everywhere)])
            case "^^":
                return joined([value.upper()])
            case ",,":
                return joined([value.lower()])
            case "^":
                return joined([value[:1].upper() + value[1:]])
            case ",":
                return joined([value[:1].lower() + value[1:]])
            case ":":
                return self._part(value, body, rest)
        return (Symbol(f"${{{body}}}", self._line),)

    def _part(self, value: str, body: str, rest: str) -> Text:
        first, _, length = rest.partition(":")
        try:
            start = self.number(first)
            if start < -len(value):
                return ()
            part = value[start:]
            if length:
                count = self.number(length)
                part = part[:count]
        except UnknownNumber:
            return (Symbol(f"${{{body}}}", self._line),)
        return joined([part])


def _present(words: tuple[Word, ...]) -> tuple[Word, ...] | None:
    if words:
        return words
    return None
