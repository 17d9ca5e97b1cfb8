"""``siirl-dask completion``: prints what makes a shell complete commands, options and files."""

from __future__ import annotations

import argparse

_SHELLS = ("bash", "zsh", "tcsh")
_FILES = (
    *("CONFIG", "RUN", "RUN_OR_MODEL", "RUN_OR_FOLDER", "MODEL", "DEST", "FILE", "PATH", "URL"),
    *("SRC... DEST", "FILE | -- key=value ..."),
)
"""Placeholders of arguments for which a shell offers files."""


def add_completion(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("shell", choices=_SHELLS, help="the shell that you type in")
    parser.epilog = (
        'bash: add the line  eval "$(siirl-dask completion bash)"  to ~/.bashrc; zsh: write the '
        "output to a file _siirl-dask in a folder of $fpath; tcsh: to ~/.complete.tcsh, and source "
        "it in ~/.tcshrc"
    )


def print_completion(options: argparse.Namespace) -> None:
    """Print the shell's code, which completes the commands of this version."""
    import shtab

    from siirl_dask.commands.program.parsing import actions_of, whole_parser

    parser = whole_parser()
    for action in actions_of(parser):
        placeholder = None
        if isinstance(action.metavar, str):
            placeholder = action.metavar
        if placeholder in _FILES and action.choices is None:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it there
    print(shtab.complete(parser, options.shell))
