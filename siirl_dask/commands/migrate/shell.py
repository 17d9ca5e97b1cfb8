"""Reads the call of a trainer out of a shell script, with the variables that the script sets.

Assignments, ``export``, arrays, ``${X:-default}``, ``$((1024 * 2))``, quotes and continued lines
are read; the script is never run. A variable that the script does not set stays, as
``${oc.env:X}``, which our configurations read as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from siirl_dask.commands.migrate.arithmetic import calculate
from siirl_dask.errors import ConfigError

_MODULE = re.compile(r"((verl|siirl|recipe)[\w.]*|[\w./-]*/(main_\w+)\.py)")
_ASSIGNMENT = re.compile(
    r"^\s*(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)="
)
_END = (";", "|", "&", ">", "<", ")", "&&", "||", "2>&1")
_REFERENCE = re.compile(
    r"\\?\$(\(\((?P<sum>.*?)\)\)|\{(?P<braced>(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|(?P<name>[A-Za-z_]\w*)|"
    r"(?P<call>\([^)]*\))|[@*#\d])"
)


@dataclass(frozen=True, slots=True)
class ShellCall:
    """Words of a trainer's command line, variables replaced."""

    words: list[str]
    module: str = ""
    """Python module that is called, such as ``verl.trainer.main_ppo``."""
    notes: list[str] = field(default_factory=list)


def read_script(text: str, name: str, variables: Mapping[str, str]) -> ShellCall:
    """Return the one call of verl or siiRL in a script; ``variables`` override what it sets.
    ConfigError if there is none, or several.
    """
    known: dict[str, str] = dict(variables)
    arrays: dict[str, list[str]] = {}
    calls: list[tuple[int, list[str]]] = []
    for line, command in _commands(text):
        match = _ASSIGNMENT.match(command)
        if match and command[match.end() :].lstrip().startswith("("):
            inside = command[match.end() :].strip()[1:].rsplit(")", 1)[0]
            found = _words(inside, known)
            arrays[match[1]] = [*(arrays.get(match[1], []) if match[2] else []), *found]
            calls += [(line, found)] if _starts(found) is not None else []
        elif match and len(assigned := _words(command[match.end() :], known, ends=True)) <= 1:
            if match[1] not in variables:
                known[match[1]] = (known.get(match[1], "") if match[2] else "") + "".join(assigned)
        elif _MODULE.search(command):
            found = [
                one
                for word in _words(command, known, ends=True)
                for one in arrays.get(_array(word), [word])
            ]
            calls += [(line, found)] if _starts(found) is not None else []
    return _only(calls, name)


def _only(calls: list[tuple[int, list[str]]], name: str) -> ShellCall:
    if not calls:
        raise ConfigError(
            f"{name}: no call of verl or siiRL in it: expected `python -m verl.trainer.main_ppo "
            "key=value ...` or `python -m siirl.main_dag key=value ...`, or a YAML file (.yaml)"
        )
    if len(calls) > 1:
        lines = ", ".join(str(line) for line, _ in calls)
        raise ConfigError(
            f"{name}: calls in the lines {lines}: expected one; give one of them after --"
        )
    (_, words) = calls[0]
    start = _starts(words)
    assert start is not None
    options = [word for word in words[start + 1 :] if word]
    unset = sorted({name for word in options for name in re.findall(r"\$\{oc\.env:(\w+)\}", word)})
    notes = [
        f"${variable} is not set in the script: the environment must have it" for variable in unset
    ]
    unread = [word for word in options if word.startswith("$(") or "=$(" in word]
    notes += [f"{word}: what this command prints is not known; write the value" for word in unread]
    return ShellCall([word for word in options if word not in unread], words[start], notes)


def _starts(words: list[str]) -> int | None:
    """Return the place of the module in the words of a call; None where they are none."""
    for place, word in enumerate(words):
        if _MODULE.fullmatch(word) and (
            place and (words[place - 1] == "-m" or word.endswith(".py"))
        ):
            return place
    return None


def _array(word: str) -> str:
    match = re.fullmatch(r"\$\{oc\.env:(\w+)\[@\]\}", word)
    return match[1] if match else ""


def _commands(text: str) -> Iterator[tuple[int, str]]:
    """Yield the commands of a script with their lines: continued lines and open parentheses of
    arrays are one.
    """
    held = ""
    first = 0
    depth = 0
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#.*$", "", raw).rstrip()
        first = first if held else number
        if (
            depth == 0
            and (match := _ASSIGNMENT.match(line))
            and line[match.end() :].lstrip().startswith("(")
        ):
            depth = 1
        joined = line.endswith("\\")
        held += line.removesuffix("\\") + ("\n" if depth else " ")
        if depth and re.search(r"\)\s*$", line) and not re.search(r"\$\(+[^()]*\)+\s*$", line):
            depth = 0
        if not joined and not depth and not _open_quote(held):
            yield first, held.strip()
            held = ""
    if held.strip():
        yield first, held.strip()


def _open_quote(text: str) -> bool:
    quote = ""
    for before, letter in zip(" " + text, text, strict=False):
        if letter in "'\"" and before != "\\" and quote in ("", letter):
            quote = "" if quote else letter
    return bool(quote)


def _words(text: str, known: Mapping[str, str], *, ends: bool = False) -> list[str]:
    """Return the words of a command, quotes taken off and variables replaced; with ``ends`` up
    to a ``;`` or a pipe.
    """
    words: list[str] = []
    word = None
    quote = ""
    place = 0
    while place < len(text):
        letter = text[place]
        reference = None if quote == "'" else _REFERENCE.match(text, place)
        if reference:
            word = (word or "") + _value(reference, known)
            place = reference.end()
            continue
        if quote and letter == quote:
            quote = ""
        elif quote:
            word = (word or "") + letter
        elif letter in "'\"":
            quote = letter
            if word is None:
                word = ""
        elif letter == "\\" and place + 1 < len(text):
            place += 1
            word = (word or "") + text[place].strip()
        elif letter.isspace() or (ends and letter in ";|&<>"):
            words += [] if word is None else [word]
            word = None
            if not letter.isspace():
                return words
        else:
            word = (word or "") + letter
        place += 1
    return words if word is None else [*words, word]


def _value(reference: re.Match[str], known: Mapping[str, str]) -> str:
    """Return what a reference stands for; ``${oc.env:X}`` for a variable that nobody set."""
    if (formula := reference["sum"]) is not None:
        return calculate(formula, known) or f"$(({formula}))"
    if reference["call"]:
        return f"${reference['call']}"
    if (name := reference["name"]) is not None:
        return known.get(name, f"${{oc.env:{name}}}")
    if (braced := reference["braced"]) is None:
        return ""  # $@ and its like: arguments of the script, of which there are none
    name, _, default = re.sub(r":([-=])", r"\1", braced, count=1).partition("-")
    name, _, assigned = name.partition("=")
    fallback = default or assigned
    if known.get(name):
        return known[name]
    return "".join(_words(fallback, known)) if fallback else f"${{oc.env:{name}}}"
