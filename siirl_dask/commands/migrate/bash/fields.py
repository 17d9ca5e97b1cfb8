"""Word splitting: the words that pieces of expanded text make."""

from __future__ import annotations

import re

from siirl_dask.commands.migrate.bash.values import Symbol, Text, Word, joined
from siirl_dask.errors import ConfigError

_LONGEST = 2**20
"""Characters of a value: a script that doubles a variable in a loop must end."""


class Fields:
    """Collects the words that pieces of text make; where it splits, unquoted white space ends
    one.
    """

    def __init__(self, line: int, *, splits: bool, is_pattern: bool = False) -> None:
        self.words: list[Word] = []
        self._is_pattern = is_pattern
        self._size = 0
        self._default_line = line
        self._line = line
        self._splits = splits
        self._open: list[str | Symbol] | None = None
        self.has_no_elements = False

    def add(self, text: Text, *, quoted: bool, line: int | None = None) -> None:
        """Add text to the word; quoted text is never split, and makes a word even if empty. In a
        pattern quoted letters stand for themselves.
        """
        if line is not None and text:
            self._line = line
        if quoted and self._is_pattern:
            text = tuple(
                re.sub(r"[*?\[]", r"[\g<0>]", piece) if isinstance(piece, str) else piece
                for piece in text
            )
        if quoted or not self._splits:
            self._extend(text)
            return
        for piece in text:
            runs = re.split(r"(\s+)", piece) if isinstance(piece, str) else [piece]
            for run in runs:
                if isinstance(run, str) and run.isspace():
                    self.end()
                elif run != "":
                    self._extend((run,))

    def _extend(self, text: Text) -> None:
        if self._open is None:
            self._open = []
        self._open.extend(text)
        self._size += sum(len(piece) for piece in text if isinstance(piece, str))
        if self._size > _LONGEST:
            raise ConfigError(
                f"line {self._default_line}: a value of more than {_LONGEST} characters"
            )

    @property
    def is_open(self) -> bool:
        """Whether a word has begun."""
        return self._open is not None

    def end(self) -> None:
        """End the word, if one has begun."""
        if self._open is not None:
            self.words.append(Word(joined(self._open), self._line))
        self._open = None
        self._size = 0
        self._line = self._default_line

    def add_plain(self, text: str) -> None:
        """Add letters that stand outside of quotes in the script itself: they are not split."""
        self._extend((text,))
