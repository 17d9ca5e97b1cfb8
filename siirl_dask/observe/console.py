"""The console that every command prints to."""

from __future__ import annotations

from rich.console import Console


class PipeConsole(Console):
    """A rich console whose closed reader, such as ``head``, is a BrokenPipeError; rich would exit with status 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True  # what is printed while the error travels goes nowhere
        raise BrokenPipeError("whoever read the output has closed it")
