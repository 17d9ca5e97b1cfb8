"""The console that every command prints to, and what is printed of an error."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from rich.console import Console

from siirl_dask.errors import SiirlError
from siirl_dask.wording import redacted


class PipeConsole(Console):
    """A rich console that raises BrokenPipeError when its reader, such as ``head``, has closed;
    rich itself exits.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True  # later prints, while the error propagates, must not raise again
        raise BrokenPipeError("whoever read the output has closed it")


def announce(error: SiirlError) -> None:
    """Print an error on stderr, with its notes and without secrets, unless that was done before."""
    if error.announced:
        return
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    report = "".join(f"\n  {line}" for line in error.report.splitlines())
    print(redacted(f"error: {error}{notes}{report}"), file=sys.stderr, flush=True)
    error.announced = True


def chat_text(messages: Iterable[object]) -> str:
    """Return the contents of a chat's messages, one below the other. An item that is no message is
    taken as it is.
    """
    texts = []
    for message in messages:
        if isinstance(message, Mapping) and "content" in message:
            texts.append(str(message["content"]))
        else:
            texts.append(str(message))
    return "\n".join(texts)


def printable(text: str) -> str:
    """Return ``text`` without characters that a terminal obeys: a model can sample escape
    sequences.
    """
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    if character.isspace():
        return " "
    return "\N{REPLACEMENT CHARACTER}"
