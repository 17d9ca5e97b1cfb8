"""Reads the command line: which command is named, and its options. Imports the module of that
command alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

from siirl_dask import __version__
from siirl_dask.commands import COMMANDS, GROUPS
from siirl_dask.commands.program.ending import EXIT_CODES
from siirl_dask.errors import did_you_mean

_PROGRAM = "siirl-dask"
_DESCRIPTION = "RL post-training of language models, on Dask."


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command that is named, with its name as ``command``.

    Ends the process as argparse does, after help, the version, and for a command or an option that
    there is not.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = "--help"
    if words:
        name = words[0]
    if name in ("-h", "--help"):
        print(help_text())
        sys.exit(0)
    if name == "--version":
        print(f"siirl_dask {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        what = "command"
        if name.startswith("-"):
            what = "option"
        hint = did_you_mean(name, ["--help", "--version", *COMMANDS])
        print(
            f"error: no {what} {name!r} (`{_PROGRAM} --help` lists all commands){hint}",
            file=sys.stderr,
        )
        sys.exit(2)
    parser = argparse.ArgumentParser(f"{_PROGRAM} {name}")
    add_arguments(parser, name)
    options = _with_words_left_over(parser, *parser.parse_known_args(words[1:]))
    options.command = name
    return options


def add_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add a command's arguments, its line and its exit codes to a parser."""
    command = COMMANDS[name]
    parser.description = f"{command.line[0].upper()}{command.line[1:]}."
    parser.epilog = EXIT_CODES
    _function(command.module, command.add)(parser)


def function_of(name: str) -> Callable[[argparse.Namespace], int | None]:
    """Return the function that runs a command."""
    command = COMMANDS[name]
    run: Callable[[argparse.Namespace], int | None] = _function(command.module, command.call)
    return run


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser of every command, for shell completion. It imports all of their modules."""
    parser = argparse.ArgumentParser(_PROGRAM, description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command")
    for name, command in COMMANDS.items():
        add_arguments(commands.add_parser(name, help=command.line), name)
    return parser


def help_text() -> str:
    """Return the commands in groups, a line each."""
    width = max(map(len, COMMANDS))
    lines = [f"usage: {_PROGRAM} COMMAND ...", "", _DESCRIPTION]
    for group, commands in GROUPS.items():
        lines += ["", group]
        lines += [f"  {name:<{width}}  {command.line}" for name, command in commands.items()]
    lines += ["", f"{_PROGRAM} COMMAND --help   options of a command"]
    lines += [f"{_PROGRAM} --version        version of the package"]
    return "\n".join(lines)


def _function(module: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"siirl_dask.commands.{module}"), name)
    return function


def _with_words_left_over(
    parser: argparse.ArgumentParser, options: argparse.Namespace, words: Sequence[str]
) -> argparse.Namespace:
    """Return the options with key=value, paths or SQL that come after an option: argparse leaves
    them over.
    """
    unknown = any(text.startswith("-") for text in words)
    if not unknown and hasattr(options, "overrides"):
        options.overrides = [*options.overrides, *words]
    elif not unknown and hasattr(options, "paths"):
        options.paths = [*options.paths, *words]
    elif not unknown and len(words) == 1 and getattr(options, "sql", words) is None:
        (options.sql,) = words
    elif words:
        hint = did_you_mean(words[0], _option_names(parser))
        parser.error(f"unrecognized arguments: {' '.join(words)}{hint}")
    return options


def _option_names(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the long options of a parser and of those below it."""
    for action in actions_of(parser):
        yield from (name for name in action.option_strings if name.startswith("--"))


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of those below it."""
    for action in parser._actions:  # argparse has no public list of them
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions_of(below)
