"""Follows a script's commands under certain assumptions, and collects the calls that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tree_sitter import Node

from siirl_dask.commands.migrate.bash.assignments import ASSIGNMENT, Assignments
from siirl_dask.commands.migrate.bash.conditions import arithmetic_command, case_matches, test
from siirl_dask.commands.migrate.bash.expansion import Expander
from siirl_dask.commands.migrate.bash.flow import (
    BreakSignal,
    CollectedCommand,
    ContinueSignal,
    ExitSignal,
    ReturnSignal,
)
from siirl_dask.commands.migrate.bash.quoting import split_at, split_source
from siirl_dask.commands.migrate.bash.tree import (
    branches,
    line_of,
    text_between,
    text_of,
    text_without,
    words_after_target,
)
from siirl_dask.commands.migrate.bash.values import (
    Assumptions,
    State,
    Text,
    Variable,
    Word,
    joined,
    known,
    lone_symbol,
    shown,
)
from siirl_dask.errors import ConfigError

_MOST_ROUNDS = 1000
_MOST_COMMANDS = 100_000
_DEEPEST = 50
_SUCCEED = (
    "cat", "cd", "chmod", "cp", "date", "echo", "export", "head", "kill", "ls", "mkdir", "mv", "pip", "pip3",
    "popd", "printf", "pushd", "ray", "rm", "set", "shopt", "sleep", "tail", "tee", "touch", "trap", "ulimit",
    "umask", "wait",
)  # fmt: skip
"""Commands that are taken to succeed; of any other one it is asked where it matters."""
_REDIRECTS = ("file_redirect", "herestring_redirect", "heredoc_redirect")


class Evaluation:
    """Runs a parsed script, but starts nothing: commands are only collected."""

    def __init__(
        self,
        parse: Callable[[bytes], Node],
        given: Mapping[str, str],
        assumptions: Assumptions,
        arguments: Sequence[str] = (),
    ) -> None:
        self._parse = parse
        self.state = State(frozenset(given), assumptions)
        for name, value in given.items():
            self.state.variables[name] = Variable((Word(joined([value]), 0),))
        self.state.positional = tuple(Word(joined([one]), 0) for one in arguments)
        self.calls: list[CollectedCommand] = []
        self.notes: list[str] = []
        self._functions: dict[str, Node] = {}
        self._variables = Assignments(self.state, self.notes)
        self._commands = 0

    def run_script(self, text: bytes) -> None:
        """Run a whole script. ConfigError for one that does not end."""
        try:
            self._all(self._parse(text))
        except (ExitSignal, ReturnSignal, BreakSignal, ContinueSignal):
            return
        except RecursionError as error:
            raise ConfigError("the script nests commands too deeply to be read") from error

    def _all(self, node: Node) -> bool | None:
        status: bool | None = True
        for child in node.named_children:
            if child.type == "comment":
                continue
            following = child.next_sibling
            if following is not None and following.type == "&":
                self._apart([child])
            else:
                status = self._run(child)
        return status

    def _run(self, node: Node) -> bool | None:
        """Run a command and return whether it succeeds; None where that is not known."""
        self._commands += 1
        if self._commands > _MOST_COMMANDS:
            raise ConfigError(f"the script runs more than {_MOST_COMMANDS} commands")
        match node.type:
            case "variable_assignment":
                self._variables.assign(node)
                return True
            case "command":
                return self._command(node)
            case "declaration_command":
                self._variables.declare(node)
                return True
            case "if_statement":
                return self._if(node)
            case "case_statement":
                return self._case(node)
            case "for_statement":
                return self._for(node)
            case "while_statement":
                return self._while(node)
            case "test_command":
                return self._test(node)
            case "list":
                return self._list(node)
            case "negated_command":
                status = self._run(node.named_children[-1])
                if status is None:
                    return None
                return not status
            case "redirected_statement":
                return self._redirected(node)
            case "pipeline" | "subshell":
                return self._apart(node.named_children)
            case "compound_statement" if node.children and node.children[0].type == "((":
                return arithmetic_command(self.state, text_of(node)[2:-2], line_of(node))
            case "function_definition":
                return self._define(node)
            case "unset_command":
                for token in split_source(text_of(node))[1:]:
                    for word in self._expander(node).words(token):
                        self._variables.unset(str(known(word.text)), line_of(node))
                return True
            case "c_style_for_statement":
                self.notes.append(f"line {line_of(node)}: the loop `for ((...))` is not followed")
                return True
            case "ERROR":
                first = " ".join(text_of(node).split())[:60]
                self.notes.append(f"line {line_of(node)}: `{first}` is not read as bash")
                return True
        return self._all(node)

    def _expander(self, node: Node) -> Expander:
        return Expander(self.state, line_of(node))

    def _holds(self, node: Node) -> bool:
        """Run a condition and return whether it holds; assumed where that is not known."""
        status = self._run(node)
        if status is None:
            return self.state.assumptions.holds(text_of(node), line_of(node))
        return status

    def _if(self, node: Node) -> bool | None:
        for conditions, body in branches(node):
            for condition in conditions[:-1]:
                self._run(condition)
            if not conditions or self._holds(conditions[-1]):
                return self._each(body)
        return True

    def _each(self, nodes: Sequence[Node]) -> bool | None:
        status: bool | None = True
        for node in nodes:
            status = self._run(node)
        return status

    def _case(self, node: Node) -> bool | None:
        value = node.child_by_field_name("value")
        assert value is not None
        word = next(child for child in node.children if child.type == "in")
        text = self._expander(node).text(text_between(node, value, word).strip())
        falls_through = False
        status: bool | None = True
        for item in node.named_children:
            if item.type != "case_item":
                continue
            closing = next(child for child in item.children if child.type == ")")
            written = text_between(item, item, closing).strip().removeprefix("(")
            patterns = [pattern.strip() for pattern in split_at(written, "|")]
            if not falls_through and not any(
                case_matches(self.state, text, pattern, line_of(item)) for pattern in patterns
            ):
                continue
            body = [one for one in item.named_children if one.start_byte > closing.start_byte]
            status = self._each([child for child in body if child.type != "comment"])
            end = item.children[-1].type
            falls_through = end == ";&"
            if end not in (";&", ";;&"):
                return status
        return status

    def _for(self, node: Node) -> bool | None:
        variable = node.child_by_field_name("variable")
        body = node.child_by_field_name("body")
        assert variable is not None
        assert body is not None
        values = node.children_by_field_name("value")
        tokens = []
        if "in" not in {child.type for child in node.children}:
            tokens = ['"$@"']
        elif values:
            tokens = split_source(text_between(node, values[0], body).rstrip("; \n"))
        words = [word for token in tokens for word in self._expander(node).words(token)]
        for word in words[:_MOST_ROUNDS]:
            text = self.state.assumptions.resolved(word.text)
            # what a command prints may be no word at all
            symbol = lone_symbol(text)
            is_printed = False
            if symbol is not None:
                is_printed = not symbol.environment
            if is_printed and not self.state.assumptions.holds(
                f"for: {shown(text)}", line_of(node)
            ):
                continue
            self.state.assign(text_of(variable), Variable((word,)))
            try:
                self._run(body)
            except BreakSignal:
                break
            except ContinueSignal:
                continue
        return True

    def _while(self, node: Node) -> bool | None:
        conditions = [child for child in node.children_by_field_name("condition") if child.is_named]
        body = node.child_by_field_name("body")
        assert body is not None
        is_until = node.children[0].type == "until"
        for _ in range(_MOST_ROUNDS):
            asked = len(self.state.assumptions.decisions)
            self._each(conditions[:-1])
            status = self._run(conditions[-1])
            if status is None or len(self.state.assumptions.decisions) > asked:
                line = line_of(node)
                self.notes.append(
                    f"line {line}: how often the loop runs is not known; not at all is assumed"
                )
                return True
            if status == is_until:
                return True
            try:
                self._run(body)
            except BreakSignal:
                return True
            except ContinueSignal:
                continue
        raise ConfigError(f"line {line_of(node)}: a loop of more than {_MOST_ROUNDS} rounds")

    def _test(self, node: Node) -> bool:
        source = text_of(node)
        line = line_of(node)
        if source.startswith("[["):
            return test(self.state, source[2:-2], splits=False, line=line)
        return test(self.state, source[1:-1], splits=True, line=line)

    def _list(self, node: Node) -> bool | None:
        left = node.named_children[0]
        right = node.named_children[-1]
        is_and = any(child.type == "&&" for child in node.children)
        status = self._run(left)
        if status is None:
            status = self.state.assumptions.holds(text_of(left), line_of(left))
        if status == is_and:
            return self._run(right)
        return status

    def _apart(self, nodes: Sequence[Node]) -> bool | None:
        """Run the parts of a pipeline, a subshell or what runs in the background, whose variables
        are theirs alone.
        """
        variables = dict(self.state.variables)
        unset = set(self.state.unset)
        positional = self.state.positional
        functions = dict(self._functions)
        status: bool | None = True
        try:
            status = self._each([node for node in nodes if node.type != "comment"])
        except (ExitSignal, ReturnSignal):
            status = None
        finally:
            self.state.variables = variables
            self.state.unset = unset
            self.state.positional = positional
            self._functions = functions
        return status

    def _redirected(self, node: Node) -> bool | None:
        """Run a command with redirections, after which further words of it may stand."""
        body = node.child_by_field_name("body")
        more = " ".join(words_after_target(child) for child in node.children)
        if body is None:
            return True
        if not more.strip():
            return self._run(body)
        if body.type != "command":
            raise ConfigError(
                f"line {line_of(node)}: words after a redirection, `{' '.join(more.split())[:60]}`, "
                "cannot be read: put them before it"
            )
        return self._command(body, more)

    def _define(self, node: Node) -> bool:
        name = node.child_by_field_name("name")
        body = node.child_by_field_name("body")
        assert name is not None
        assert body is not None
        self._functions[text_of(name)] = body
        return True

    def _command(self, node: Node, more: str = "") -> bool | None:
        """Run a command; ``more`` are words of it that stand after a redirection."""
        inside = " ".join(words_after_target(child) for child in node.children)
        written = text_without(node, (*_REDIRECTS, "comment"))
        tokens = split_source(f"{written} {inside} {more}")
        assignments: list[re.Match[str]] = []
        while tokens and (match := ASSIGNMENT.fullmatch(tokens[0])):
            assignments.append(match)
            tokens.pop(0)
        expander = self._expander(node)
        if not tokens:
            # the parser takes the rest of some assignments for a command
            for match in assignments:
                self._variables.set_text(match[1], match[3], line_of(node), appends=bool(match[2]))
            return True
        words = [word for token in tokens for word in expander.words(token)]
        if not words:
            return True
        source = " ".join(tokens)
        call = CollectedCommand(tuple(words), line_of(node))
        name = known(words[0].text)
        if (
            name in ("command", "builtin", "exec")
            and known(words[1].text if words[1:] else ()) != "-v"
        ):
            words = words[1:]
            name = None
            if words:
                name = known(words[0].text)
        arguments = words[1:]
        if name in self._functions:
            return self._function(str(name), arguments, line_of(node))
        if name != "eval":
            self.calls.append(call)
        return self._builtin(str(name), arguments, node, source)

    def _builtin(
        self,
        name: str,
        arguments: Sequence[Word],
        node: Node,
        source: str,
    ) -> bool | None:
        """Run what the shell itself does; return None for a program that may fail."""
        texts = [known(self.state.assumptions.resolved(word.text)) for word in arguments]
        line = line_of(node)
        match name:
            case "exit":
                raise ExitSignal
            case "return":
                raise ReturnSignal
            case "break" | "continue" if texts[:1] not in ([], ["1"]):
                raise ConfigError(f"line {line}: `{source}` out of several loops is not followed")
            case "break":
                raise BreakSignal
            case "continue":
                raise ContinueSignal
            case "true" | ":":
                return True
            case "false":
                return False
            case "test" | "[":
                inside = source.strip().removeprefix(name).strip()
                if name == "[":
                    inside = inside.removesuffix("]")
                return test(self.state, inside, splits=True, line=line)
            case "let":
                return arithmetic_command(self.state, " ".join(map(str, texts)), line)
            case "shift":
                first = ""
                if texts:
                    first = str(texts[0])
                count = 1
                if first.isdigit():
                    count = int(first)
                if count > len(self.state.positional):
                    return False
                self.state.positional = self.state.positional[count:]
                return True
            case "set" if "--" in texts:
                self.state.positional = tuple(arguments[texts.index("--") + 1 :])
                return True
            case "set" if arguments and not str(texts[0]).startswith(("-", "+")):
                self.state.positional = tuple(arguments)
                return True
            case "shopt" if "nocasematch" in texts:
                self.state.ignores_case = "-s" in texts
                return True
            case "eval":
                return self._evaluated([word.text for word in arguments], line)
            case "source" | ".":
                self.notes.append(f"line {line}: `{' '.join(source.split())[:80]}` is not followed")
                return True
            case "read" | "mapfile" | "readarray" | "getopts":
                for text in texts:
                    self._variables.set_unknown(text, source, line)
                if name in ("getopts", "read"):
                    return None
                return True
            case "printf" if texts[:1] == ["-v"]:
                self._variables.set_unknown(texts[1], source, line)
                return True
        if name in _SUCCEED:
            return True
        return None

    def _evaluated(self, texts: Sequence[Text], line: int) -> bool | None:
        """Run the text of an ``eval``, whose calls are of its own line."""
        source = ""
        for place, piece in enumerate(piece for text in texts for piece in (" ", *text)):
            if isinstance(piece, str):
                source += piece
            else:
                name = f"_unknown_{line}_{place}"
                self.state.variables[name] = Variable((Word((piece,), line),))
                source += f"${{{name}}}"
        before = len(self.calls)
        status = self._all(self._parse(source.encode()))
        self.calls[before:] = [replace(call, line=line) for call in self.calls[before:]]
        return status

    def _function(self, name: str, arguments: Sequence[Word], line: int) -> bool | None:
        if self._variables.depth >= _DEEPEST:
            raise ConfigError(f"line {line}: functions call each other more than {_DEEPEST} deep")
        try:
            with self._variables.of_function(arguments):
                return self._run(self._functions[name])
        except ReturnSignal:
            return None
