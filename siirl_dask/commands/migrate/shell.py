"""Reads the call of a trainer out of a shell script, in every way that the script may go.

The script is never run. Where a condition turns on what the script alone does not tell, such as
an environment variable or what a command prints, both ways are followed, and each has its call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from siirl_dask.commands.migrate.bash.parser import parser
from siirl_dask.commands.migrate.bash.values import Assumptions, Decision, Symbol, Text, Word, known
from siirl_dask.errors import ConfigError

if TYPE_CHECKING:
    from siirl_dask.commands.migrate.bash.flow import CollectedCommand

_MODULE = re.compile(r"((verl|siirl|recipe)[\w.]*|[\w./-]*/(main_\w+)\.py)")
_MOST_WAYS = 64
_DATE = re.compile(r"\$\(\s*date\b[^)]*\)|`\s*date\b[^`]*`")
_SEVERAL = re.compile(r"\s[+~]*[a-z]\w*(\.\w+)+=")


@dataclass(frozen=True, slots=True)
class ShellOption:
    """One word after the module of a call."""

    text: str
    """The word, with ``${oc.env:X}`` for a variable that the script does not set."""
    line: int
    unread: str = ""
    """Part of it that is not known, as the script writes it: a command, mostly."""


@dataclass(frozen=True, slots=True)
class ShellCall:
    """A trainer's command line, in one of the ways that its script may go."""

    options: list[ShellOption]
    module: str = ""
    """Python module that is called, such as ``verl.trainer.main_ppo``."""
    notes: list[str] = field(default_factory=list)
    assumed: str = ""
    """Assumption where the script does not tell: ``DEVICE=gpu``; "" where it tells all."""


@dataclass(frozen=True, slots=True)
class Script:
    """All ways that a script may go."""

    ways: list[ShellCall]
    """At least one; those with the same options are one."""
    questions: list[str]
    """Sentences on what decides between the ways."""


@dataclass(frozen=True, slots=True)
class _Way:
    assumptions: Assumptions
    call: CollectedCommand
    start: int
    notes: list[str]

    @property
    def words(self) -> list[Word]:
        """Words after the module."""
        return [*self.call.words[self.start + 1 :]]


def read_script(text: str, name: str, variables: Mapping[str, str]) -> Script:
    """Return the one call of verl or siiRL in a script; ``variables`` override what it sets.
    ConfigError if there is none, or several.
    """
    try:
        ways = _explored(text, name, variables)
        calls = [_call(way) for way in ways]
    except ConfigError as error:
        message = str(error)
        if not message.startswith(name):
            message = f"{name}: {message}"
        raise ConfigError(message) from error
    different: list[ShellCall] = []
    seen: set[tuple[tuple[str, str], ...]] = set()
    for call in calls:
        key = tuple((option.text, option.unread) for option in call.options)
        if key not in seen:
            seen.add(key)
            different.append(call)
    questions = []
    if len(different) > 1:
        questions = _questions(ways, calls)
    return Script(different, questions)


def _explored(text: str, name: str, variables: Mapping[str, str]) -> list[_Way]:
    """Follow the script in every way in which it reaches its call."""
    parse = parser()
    # tree_sitter, which only a script needs
    from siirl_dask.commands.migrate.bash.evaluation import Evaluation

    prefixes: list[list[bool]] = [[]]
    ways: list[_Way] = []
    followed = 0
    decisions: list[Decision] = []
    while prefixes:
        prefix = prefixes.pop()
        followed += 1
        assumptions = Assumptions(prefix)
        evaluation = Evaluation(parse, variables, assumptions)
        evaluation.run_script(text.encode())
        answers = [decision.answer for decision in assumptions.decisions]
        for place in range(len(answers) - 1, len(prefix) - 1, -1):
            prefixes.append([*answers[:place], not answers[place]])
        decisions += assumptions.decisions
        if followed + len(prefixes) > _MOST_WAYS:
            lines = sorted({decision.line for decision in decisions})
            raise ConfigError(
                f"{name}: the conditions in the lines {', '.join(map(str, lines))} turn on what "
                f"the script does not tell, in more than {_MOST_WAYS} ways: give "
                f"{_wanted(decisions)}"
            )
        started = [
            (call, start) for call in evaluation.calls if (start := _starts(call)) is not None
        ]
        if len(started) > 1:
            lines = sorted({call.line for call, _ in started})
            raise ConfigError(
                f"{name}: calls in the lines {', '.join(map(str, lines))}: expected one; give one "
                "of them after --"
            )
        for call, start in started:
            ways.append(_Way(assumptions, call, start, evaluation.notes))
    if not ways:
        raise ConfigError(
            f"{name}: no call of verl or siiRL in it: expected `python -m verl.trainer.main_ppo "
            "key=value ...` or `python -m siirl.main_dag key=value ...`, or a YAML file (.yaml)"
        )
    return ways


def _wanted(decisions: list[Decision]) -> str:
    """Return what to give so that decisions are known."""
    names = [one.symbol.variable for one in decisions if one.symbol is not None]
    unique = [name for name in dict.fromkeys(names) if name]
    if not unique:
        return "the options themselves after --"
    return f"{', '.join(f'{name}=value' for name in unique)} after the file"


def _starts(call: CollectedCommand) -> int | None:
    """Return the place of the module in the words of a call; None where they are none."""
    words = [known(word.text) for word in call.words]
    for place, word in enumerate(words):
        if word is None or not place or not _MODULE.fullmatch(word):
            continue
        if words[place - 1] == "-m" or word.endswith(".py"):
            return place
    return None


def _call(way: _Way) -> ShellCall:
    """Return a call's options, and what is to be said of them."""
    notes = list(dict.fromkeys(way.notes))
    options: list[ShellOption] = []
    unset: set[str] = set()
    for word in way.words:
        option, dated = _option(way.assumptions.resolved(word.text), word.line)
        if not option.text and not option.unread:
            continue
        if _SEVERAL.search(option.text):
            raise ConfigError(
                f"line {option.line}: {option.text[:100]!r} is one word with several options in "
                "it: take the quotes off, or give each its own"
            )
        if dated:
            notes.append(f"{option.text.partition('=')[0]}: the time in {dated} is left out")
        unset.update(re.findall(r"\$\{oc\.env:(\w+)\}", option.text))
        options.append(option)
    unset.discard("HOME")
    notes += [
        f"${one} is not set in the script: the environment must have it" for one in sorted(unset)
    ]
    module = known(way.call.words[way.start].text)
    subjects = dict.fromkeys(decision.subject for decision in way.assumptions.decisions)
    labels = [way.assumptions.label(subject) for subject in subjects]
    return ShellCall(options, str(module), notes, ", ".join(labels))


def _option(text: Text, line: int) -> tuple[ShellOption, str]:
    """Return one word as an option, and the command in it whose time was left out, if any."""
    made: list[str] = []
    dated = ""
    unread: list[str] = []
    for piece in text:
        if isinstance(piece, str):
            if dated and made and not made[-1]:
                made.append(piece.lstrip("_-"))
            else:
                made.append(piece)
        elif piece.environment:
            made.append(f"${{oc.env:{piece.environment}}}")
        elif _DATE.fullmatch(piece.source) and _has_other_text(text):
            dated = piece.source
            if made:
                made[-1] = made[-1].rstrip("_-")
        else:
            unread.append(piece.source)
            made.append(piece.source)
    return ShellOption("".join(made), line, " ".join(unread)), dated


def _has_other_text(text: Text) -> bool:
    """Return whether the value of an option is more than the times in it."""
    if any(isinstance(piece, Symbol) and not _DATE.match(piece.source) for piece in text):
        return True
    rest = "".join(piece for piece in text if isinstance(piece, str))
    return bool(rest.partition("=")[2].strip("_-/"))


def _questions(ways: list[_Way], calls: list[ShellCall]) -> list[str]:
    """Return a sentence on each subject on which the options turn."""
    subjects: dict[str, Decision] = {}
    for way in ways:
        for decision in way.assumptions.decisions:
            subjects.setdefault(decision.subject, decision)
    relevant = [subject for subject in subjects if _matters(subject, ways, calls)]
    sentences = []
    if not relevant:
        relevant = list(subjects)
    for subject in relevant:
        decision = subjects[subject]
        lines = {
            one.line for way in ways for one in way.assumptions.decisions if one.subject == subject
        }
        where = ", ".join(map(str, sorted(lines)))
        choices = [way.assumptions.label(subject) for way in ways]
        known_choices = " or ".join(dict.fromkeys(choice for choice in choices if choice))
        symbol = decision.symbol
        if symbol is None:
            sentences.append(
                f"`{subject}` (line {where}) is not known here, and options turn on it: take the "
                "values of the way that it goes"
            )
        elif symbol.environment:
            sentences.append(
                f"{symbol.variable} is not set in the script, and options turn on it (line "
                f"{where}): {known_choices}; give {symbol.variable}=value after the file"
            )
        else:
            name = symbol.source
            advice = ""
            if symbol.variable:
                name = symbol.variable
                advice = f"; give {name}=value after the file"
            sentences.append(
                f"{name} (line {symbol.line}) is what `{symbol.source}` prints, and options turn "
                f"on it (line {where}): {known_choices}{advice}"
            )
    return sentences


def _matters(subject: str, ways: list[_Way], calls: list[ShellCall]) -> bool:
    """Return whether two ways that differ in this subject alone have different options."""
    others: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for way, call in zip(ways, calls, strict=True):
        labels = {
            one.subject: way.assumptions.label(one.subject)
            for one in way.assumptions.decisions
            if one.subject != subject
        }
        key = tuple(sorted(labels.values()))
        others.setdefault(key, set()).add(tuple(option.text for option in call.options))
    return any(len(found) > 1 for found in others.values())


__all__ = ["Script", "ShellCall", "ShellOption", "read_script"]
