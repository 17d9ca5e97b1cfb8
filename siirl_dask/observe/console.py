"""The console that every command prints to."""

from __future__ import annotations

from rich.console import Console


class PipeConsole(Console):
    """A rich console that raises BrokenPipeError when its reader, such as ``head``, has closed; rich itself exits."""

    def on_broken_pipe(self) -> None:
        self.quiet = True  # later prints, while the error propagates, must not raise again
        raise BrokenPipeError("whoever read the output has closed it")


def printable(text: str) -> str:
    """Return ``text`` without characters that a terminal obeys: a model can sample escape sequences."""
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"
