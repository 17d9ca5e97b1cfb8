"""A program of a model, run by itself as a script, or in one module with its test."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any


def run_program(task: dict[str, Any]) -> None:
    """Run the program as the main module. It reads its input from standard input and prints to
    standard output.
    """
    try:
        exec(compile(task["code"], "program", "exec"), module("__main__"))
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    sys.stdout.flush()


def run_together(task: dict[str, Any]) -> None:
    """Run the program, not as the main module, then its test in the same module, and print the
    token.

    The program shares its memory with the test and the token, so it can print that by itself.
    """
    answer = silence()[1]
    names = module("solution")
    exec(compile(task["code"], "solution", "exec"), names)
    exec(compile(task["test"], "test", "exec"), names)
    os.write(answer, task["token"].encode())


def module(name: str) -> dict[str, Any]:
    """Return the namespace of a new module; it is in sys.modules, where dataclasses look for it."""
    sys.modules[name] = ModuleType(name)
    return vars(sys.modules[name])


def silence() -> tuple[int, int]:
    """Return copies of standard input and output, which read and write nothing from here on."""
    files = os.dup(0), os.dup(1)
    for file in (0, 1):
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, file)
        os.close(nothing)
    return files
