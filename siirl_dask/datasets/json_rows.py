"""Reads the objects of JSON files some at a time: one a line, one after the other, or the items of an array.

Whole numbers are exact, of whatever size. Others are ``bytes``: the digits that the file has, since what becomes of
them is decided by all values of a column. (A type of their own would be one that Python's garbage collector counts.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from fsspec import AbstractFileSystem
from siirl_storage.files import full_name, open_input

from siirl_dask.errors import DataError

LARGEST_ROW = 2**24
"""Characters that a row's text may have."""
_ROWS = 2**13  # of a block
_BLOCK = 2**22  # characters of a block's text, about
_CHUNK = 2**20  # bytes that are read at once
_MINUS_ZERO = re.compile(r"-0(?![.0-9eE])")  # which a whole number would not keep; also in texts
_SPACE = re.compile(r"[ \t\n\r]*")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one file that follow each other."""

    file: str
    first: int
    """Number of the first row in its file; the file's first is 1."""
    rows: Sequence[dict[str, Any]]


class _RepeatedKeyError(Exception):
    pass


def read_blocks(fs: AbstractFileSystem, files: Sequence[str]) -> Iterator[Block]:
    """Yield the objects of all files in their order. DataError names file and row of what is no object, and of a key
    that an object has twice.
    """
    for path in files:
        yield from _Objects(full_name(fs, path)).blocks(_texts(fs, path))


def _texts(fs: AbstractFileSystem, path: str) -> Iterator[str]:
    """Yield the file's text piece by piece; compressed files are unpacked."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_text(fs, path) as file:
        while data := file.read(_CHUNK):
            yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


@contextmanager
def open_text(fs: AbstractFileSystem, path: str) -> Iterator[pa.NativeFile]:
    """Open a file to be read from its beginning, unpacked where its name ends in .gz or .zst."""
    compression = next((kind for ending, kind in _COMPRESSIONS.items() if path.lower().endswith(ending)), None)
    with open_input(fs, path) as file:
        if compression is None:
            yield file
        else:
            yield pa.CompressedInputStream(file, compression)


class _Objects:
    """Finds the objects in one file's text."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._decoder = _decoder(int)
        self._text = ""
        self._at = 0  # in the text
        self._lines_before = 0  # before the text
        self._row = 1
        self._line_by_line = True

    def blocks(self, texts: Iterator[str]) -> Iterator[Block]:
        try:
            if not self._skip_space(texts):
                return
            rows: Iterator[list[dict[str, Any]]]
            if self._text.startswith("[", self._at):
                self._at += 1
                rows = _gathered(self._items(texts))
            else:
                rows = self._lines(texts)
            first = 1
            for some in rows:
                yield Block(self._file, first, some)
                first += len(some)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._file} cannot be read after row {self._row - 1}: {error}") from error

    def _lines(self, texts: Iterator[str]) -> Iterator[list[dict[str, Any]]]:
        """Yield objects that follow each other: whole lines at once, and others one by one."""
        while self._skip_space(texts):
            rows = self._next_lines()
            if rows is None:
                row, _ = self._next(texts)
                rows = [row]
            yield rows

    def _next_lines(self) -> list[dict[str, Any]] | None:
        """Return the objects of the lines that have been read; None where a line is not one object."""
        end = self._text.rfind("\n", self._at, self._at + _BLOCK)
        if end < 0 or not self._line_by_line:
            return None
        lines = self._text[self._at : end].split("\n", _ROWS)
        if len(lines) > _ROWS:
            end -= len(lines.pop()) + 1
        objects = [line for line in lines if line and not line.isspace()]
        try:
            rows, _ = self._decoder.raw_decode("[" + ",".join(objects) + "]")
        except (ValueError, _RepeatedKeyError, RecursionError):
            rows = []
        if len(rows) != len(objects) or set(map(type, rows)) != {dict}:
            self._line_by_line = False  # objects of several lines, or an error, which is found row by row
            return None
        self._at = end
        self._row += len(rows)
        return list(rows)

    def _items(self, texts: Iterator[str]) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield the objects of an array, whose bracket has been read."""
        self._skip_space(texts)
        if self._text.startswith("]", self._at):
            self._at += 1
        else:
            yield from self._rest_of_array(texts)
        if self._skip_space(texts):
            raise self._wrong("there is more after the array", self._at)

    def _rest_of_array(self, texts: Iterator[str]) -> Iterator[tuple[dict[str, Any], int]]:
        while True:
            self._skip_space(texts)
            yield self._next(texts)
            self._skip_space(texts)
            mark = self._text[self._at : self._at + 1]
            if mark not in (",", "]"):
                raise self._wrong("expected a comma or the end of the array", self._at)
            self._at += 1
            if mark == "]":
                return

    def _next(self, texts: Iterator[str]) -> tuple[dict[str, Any], int]:
        """Return the object that begins here, with the length of its text."""
        while True:
            try:
                row, end = self._decoder.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > LARGEST_ROW:
                    raise self._wrong(f"{error.msg} (a row may have {LARGEST_ROW} characters)", error.pos) from error
                if not self._more(texts):
                    raise self._wrong(error.msg, error.pos) from error
            except _RepeatedKeyError as error:
                raise self._wrong(f"an object has the key {error.args[0]!r:.100} twice", self._at) from error
            except ValueError as error:  # a whole number of thousands of digits
                raise self._wrong(str(error), self._at) from error
            except RecursionError as error:
                raise self._wrong("its values are nested too deep", self._at) from error
        if type(row) is not dict:
            raise self._wrong("it is no object: expected {...} with the names of columns", self._at)
        length = end - self._at
        self._at = end
        self._row += 1
        return row, length

    def _skip_space(self, texts: Iterator[str]) -> bool:
        """Go on to what is no space; return whether there is something."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return True
            if not self._more(texts):
                return False

    def _more(self, texts: Iterator[str]) -> bool:
        """Read on, as much again as is held of a long row; return whether there was more."""
        pieces: list[str] = []
        length = 0
        while length <= len(self._text) - self._at:
            piece = next(texts, None)
            if piece is None:
                break
            pieces.append(piece)
            length += len(piece)
        if length == 0:
            return False
        self._lines_before += self._text.count("\n", 0, self._at)
        self._text = self._text[self._at :] + "".join(pieces)
        self._at = 0
        if _MINUS_ZERO.search(self._text):
            self._decoder = _decoder(_whole)
        return True

    def _wrong(self, what: str, at: int) -> DataError:
        line = self._lines_before + self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        return DataError(f"{self._file} cannot be read: row {self._row}, line {line}, column {column}: {what}")


def _gathered(rows: Iterator[tuple[dict[str, Any], int]]) -> Iterator[list[dict[str, Any]]]:
    """Yield rows, of which each has the length of its text, in lists of bounded size."""
    held: list[dict[str, Any]] = []
    size = 0
    for row, length in rows:
        held.append(row)
        size += length
        if len(held) == _ROWS or size >= _BLOCK:
            yield held
            held = []
            size = 0
    if held:
        yield held


def _decoder(parse_int: Callable[[str], int | bytes]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object, parse_int=parse_int, parse_float=str.encode, parse_constant=str.encode
    )


def _whole(text: str) -> int | bytes:
    return text.encode() if text == "-0" else int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return found
