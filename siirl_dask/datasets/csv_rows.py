"""Reads CSV (RFC 4180) as it is written: a quote within a field that has none around it, or after
one, is an error.

Other readers take such a field for what it may mean, or cannot tell an empty text from nothing.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from operator import itemgetter

from fsspec import AbstractFileSystem
from siirl_storage import full_name

from siirl_dask.datasets.json_rows import LARGEST_ROW, not_utf8, open_text
from siirl_dask.errors import DataError, counted

Columns = list[list[str | None]]
_CHUNK = (
    2**17
    # bytes that are read at once: fields of more take longer than their bytes, in the garbage
    # collector
)
_Field = tuple[str, str, str]  # with quotes around it, without, and what follows


def read_csv_columns(fs: AbstractFileSystem, path: str, separator: str) -> Iterator[Columns]:
    """Yield a CSV file's columns, some rows at a time; None where there is nothing between
    separators.

    The first row has the names. A line with nothing in it is no row, but in a file of one column.
    DataError names the line that is no row of as many fields as the first.
    """
    reader = _CsvReader(full_name(fs, path), separator)
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_text(fs, path) as file:
        try:
            while data := file.read(_CHUNK):
                yield from reader.add(decoder.decode(data))
            yield from reader.add(decoder.decode(b"", final=True), last=True)
        except UnicodeDecodeError as error:
            raise reader.wrong(not_utf8(error)) from error


class _CsvReader:
    def __init__(self, file: str, separator: str) -> None:
        self._file = file
        mark = re.escape(separator)
        self._field = re.compile(
            rf'(?:("(?:[^"]++|"")*+")|([^"\r\n{mark}]*+))({mark}|\r\n|\n|\r|\Z)'
        )
        self._separator = separator
        self._text = ""
        self._line = 1  # at which the text begins
        self._count: int | None = None  # of columns

    def add(self, text: str, *, last: bool = False) -> Iterator[Columns]:
        """Yield the rows that end in what has been read."""
        self._text += text
        end = len(self._text)
        if not last:
            end = self._end_of_rows()
        if end:
            yield self._columns_of(self._text[:end])
            self._text = self._text[end:]
        elif len(self._text) > LARGEST_ROW:
            raise self.wrong(
                f"a row has more than {LARGEST_ROW} characters, or a quote that nothing closes"
            )

    def _end_of_rows(self) -> int:
        """Return where the last whole row ends: at an end of line with an even number of quotes
        before it.
        """
        end = len(self._text) - 1  # what follows an end of line tells \r from \r\n
        while True:
            end = max(self._text.rfind("\n", 0, end), self._text.rfind("\r", 0, end))
            if end < 0:
                return 0
            if self._text.count('"', 0, end) % 2 == 0:
                break
            end = self._text.rfind('"', 0, end)
        if self._text[end : end + 2] == "\r\n":
            return end + 2
        return end + 1

    def _columns_of(self, text: str) -> Columns:
        fields: list[_Field] = self._field.findall(text)
        if fields[-1] == ("", "", ""):
            fields.pop()  # after the last line
        quoted = list(map(itemgetter(0), fields))
        plain = list(map(itemgetter(1), fields))
        marks = list(map(itemgetter(2), fields))
        length = sum(map(len, quoted)) + sum(map(len, plain)) + sum(map(len, marks))
        if length != len(text):
            raise self._misquoted(text)
        ends = [number for number, mark in enumerate(marks, 1) if mark != self._separator]
        if self._count is None and ends:
            self._count = ends[0]
        count = 1 if self._count is None else self._count
        if ends != list(range(count, len(fields) + 1, count)):
            fields = self._without_empty_lines(fields, ends, count)
            quoted = [field[0] for field in fields]
            plain = [field[1] for field in fields]
        self._line += _lines(text)
        return [_cells(quoted[number::count], plain[number::count]) for number in range(count)]

    def _without_empty_lines(
        self,
        fields: list[_Field],
        ends: list[int],
        count: int,
    ) -> list[_Field]:
        """Return the fields of lines that have any. DataError for a row that does not have
        ``count``.
        """
        kept: list[_Field] = []
        first = 0
        for end in ends:
            row = fields[first:end]
            if len(row) == count:
                kept += row
            elif len(row) > 1 or row[0][0] or row[0][1]:
                line = self._line + _lines("".join(map("".join, fields[:end]))) - 1
                raise self.wrong(
                    f"the row that ends here has {counted(len(row), 'field')}, and the first {count}",
                    line,
                )
            first = end
        return kept

    def _misquoted(self, text: str) -> DataError:
        at = 0
        while (found := self._field.match(text, at)) and found.end() > at:
            at = found.end()
        line = self._line + _lines(text[:at])
        return self.wrong(
            'a quote within a field: fields with quotes have " around them, and "" for each in '
            "them",
            line,
        )

    def wrong(self, what: str, line: int | None = None) -> DataError:
        """Return the error for a line, or for the first that has not been read."""
        return DataError(f"{self._file} cannot be read: line {line or self._line}: {what}")


def _cells(quoted: Sequence[str], plain: Sequence[str]) -> list[str | None]:
    if not any(quoted):
        return [text or None for text in plain]
    cells: list[str | None] = []
    for inner, outer in zip(quoted, plain, strict=True):
        if inner:
            cells.append(inner[1:-1].replace('""', '"'))
        else:
            cells.append(outer or None)
    return cells


def _lines(text: str) -> int:
    ends = text.count("\n")
    if "\r" in text:
        ends += text.count("\r") - text.count("\r\n")
    return ends
