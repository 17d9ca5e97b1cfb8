"""Reads the objects of JSON files some at a time: one a line, one after the other, or the items of
an array.

Whole numbers are exact, of whatever size. Others are ``bytes``: the digits that the file has, since
what becomes of them is decided by all values of a column. (A type of their own would be one that
Python's garbage collector counts.)

Lines of texts, truth values and whole numbers, once their types are known, are read by pyarrow,
three times as fast. Of such types it takes no value that is not written so, and no key that is
there twice.
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
import pyarrow.json as pj
from fsspec import AbstractFileSystem
from siirl_storage import full_name, open_input
from siirl_storage.formats import FIRST_BYTES, stand_in

from siirl_dask.datasets.whole_tables import CURE, table_in_one_object
from siirl_dask.errors import DataError, clause

LARGEST_ROW = 2**24
"""Characters that a row's text may have."""
_ROWS = 2**13  # of a block
_BLOCK = 2**22  # characters of a block's text, about
# bytes that are read at once: texts of more are memory that the system has to clear each time
_CHUNK = 2**18
_MINUS_ZERO = re.compile(r"-0(?![.0-9eE])")  # which a whole number would not keep; also in texts
_NULL_ROW = re.compile(r"\}[ \t\n\r]*+null")  # on which pyarrow crashes; also in texts
_SPACE = re.compile(r"[ \t\n\r]*+")
_COMMA = re.compile(r"[ \t\n\r]*+,[ \t\n\r]*+")
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_OTHER_CONTENT = {
    b"\xff\xfe": "it is in UTF-16: `iconv -f UTF-16 -t UTF-8` makes the text in UTF-8 of it",
    b"\xfe\xff": "it is in UTF-16: `iconv -f UTF-16 -t UTF-8` makes the text in UTF-8 of it",
    b"\x1f\x8b": "it is packed by gzip: give it a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "it is packed by zstd: give it a name that ends in .zst",
    b"PK\x03\x04": "it is a ZIP archive: unpack it first",
    b"PAR1\x15": "it is a Parquet file: give it a name that ends in .parquet",
}
"""First bytes of files that are no text, and what to say of each."""
# Arrow's errors over packed bytes, which have no kind of their own
_NOT_UNPACKED = re.compile(r"(inflate|decompress)\w* failed|truncated compressed", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one file that follow each other."""

    file: str
    first: int
    """Number of the first row in its file; the file's first is 1."""
    rows: Sequence[dict[str, Any]] | pa.RecordBatch
    """A batch where all rows have the types that the reader was asked about."""


class _RepeatedKeyError(Exception):
    pass


def read_blocks(
    fs: AbstractFileSystem, files: Sequence[str], exact_schema: Callable[[], pa.Schema | None]
) -> Iterator[Block]:
    """Yield the objects of all files in their order. DataError names file and row of what is no
    object, and of a key that an object has twice, and a file that holds a whole table in one object.

    ``exact_schema`` returns the schema of batches, if there is one: of texts, truth values and
    int64, in structs and lists; keys that a row does not have are null.
    """
    for path in files:
        yield from _JsonObjects(fs, path, exact_schema).blocks()


def _texts(fs: AbstractFileSystem, path: str) -> Iterator[str]:
    """Yield the file's text piece by piece; compressed files are unpacked."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    with open_text(fs, path) as file:
        while data := file.read(_CHUNK):
            yield decoder.decode(data)
    yield decoder.decode(b"", final=True)


@contextmanager
def open_text(fs: AbstractFileSystem, path: str) -> Iterator[pa.NativeFile]:
    """Open a file to be read from its beginning, unpacked where its name ends in .gz or .zst.
    DataError for one that is not packed so, or is damaged, and for what stands in its place.
    """
    compression = next(
        (kind for ending, kind in _COMPRESSIONS.items() if path.lower().endswith(ending)), None
    )
    with open_input(fs, path) as file:
        other = stand_in(file.read(FIRST_BYTES))
        if other is not None:
            raise DataError(f"{full_name(fs, path)} cannot be read: {other}")
        file.seek(0)
        if compression is None:
            yield file
            return
        try:
            yield pa.CompressedInputStream(file, compression)
        except OSError as error:
            if _NOT_UNPACKED.search(str(error)) is None:
                raise  # of the store
            raise DataError(
                f"{path!r} ends as a file of {compression} and cannot be unpacked: {clause(error)}: it is "
                "packed otherwise, or not whole"
            ) from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what a file is that is no text in UTF-8, as its first bytes tell, and what to do."""
    for first, what in _OTHER_CONTENT.items():
        if error.object.startswith(first):
            return what
    return f"expected a text in UTF-8: {error}"


class _JsonObjects:
    """Finds the objects in one file's text."""

    def __init__(
        self,
        fs: AbstractFileSystem,
        path: str,
        exact_schema: Callable[[], pa.Schema | None],
    ) -> None:
        self._fs = fs
        self._exact_schema = exact_schema
        self._tries_exact = True
        self._path = path
        self._texts = _texts(fs, path)
        self._decoder = _decoder(int)
        self._text = ""
        self._at = 0  # in the text
        self._before = 0  # characters of the file before the text
        self._row = 1

    def blocks(self) -> Iterator[Block]:
        file = full_name(self._fs, self._path)
        try:
            if not self._skip_space():
                return
            is_array = self._text.startswith("[", self._at)
            if is_array:
                self._at += 1
            first = 1
            for rows in self._items() if is_array else self._lines():
                if not is_array and self._row == 2 and not self._skip_space():
                    self._refuse_table(rows)
                yield Block(file, first, rows)
                first = self._row
        except UnicodeDecodeError as error:
            raise DataError(
                f"{file} cannot be read after row {self._row - 1}: {not_utf8(error)}"
            ) from error

    def _refuse_table(self, rows: list[dict[str, Any]] | pa.RecordBatch) -> None:
        """Raise DataError where the one object of the file is a whole table."""
        row = rows.to_pylist()[0] if isinstance(rows, pa.RecordBatch) else rows[0]
        layout = table_in_one_object(row)
        if layout is not None:
            raise DataError(
                f"{full_name(self._fs, self._path)} is one object with a whole table in it "
                f"({layout}), and would be read as one row: {CURE}; if it is one row, put it in "
                "brackets, [{...}]"
            )

    def _lines(self) -> Iterator[list[dict[str, Any]] | pa.RecordBatch]:
        """Yield objects that follow each other, on lines or not."""
        while self._skip_space():
            batch = None
            if self._tries_exact:
                batch = self._exact_lines()
            if batch is None:
                yield self._next_rows(_SPACE)
            else:
                yield batch

    def _exact_lines(self) -> pa.RecordBatch | None:
        """Return the whole lines that have been read, if they have the types that were asked
        about, and no -0.
        """
        schema = self._exact_schema()
        if schema is None:
            return None
        end = self._text.rfind("\n", self._at) + 1
        if end <= self._at and self._more():
            end = self._text.rfind("\n", self._at) + 1
        if end <= self._at:
            return None
        lines = self._text[self._at : end]
        self._tries_exact = _may_be_exact(lines)
        if not self._tries_exact:
            return None
        data = lines.encode()
        try:
            table = pj.read_json(
                pa.BufferReader(data),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(data)),
                parse_options=pj.ParseOptions(
                    explicit_schema=schema, unexpected_field_behavior="error"
                ),
            )
        except pa.ArrowInvalid:
            self._tries_exact = False
            return None
        self._at = end
        self._row += table.num_rows
        return table.combine_chunks().to_batches()[0]

    def _items(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the objects of an array, whose bracket has been read."""
        self._skip_space()
        ended = self._text.startswith("]", self._at)
        while not ended:
            self._skip_space()
            yield self._next_rows(_COMMA)
            self._skip_space()
            mark = self._text[self._at : self._at + 1]
            if mark not in (",", "]"):
                raise self._wrong("expected a comma or the end of the array", self._at)
            ended = mark == "]"
            if not ended:
                self._at += 1
        self._at += 1
        if self._skip_space():
            raise self._wrong("there is more after the array", self._at)

    def _next_rows(self, between: re.Pattern[str]) -> list[dict[str, Any]]:
        """Return the object that begins here, and those after it that end within what has been
        read.
        """
        rows = [self._next()]
        decode = self._decoder.raw_decode
        text = self._text
        at = self._at
        last = min(len(text), at + _BLOCK)
        try:
            while at < last and len(rows) < _ROWS:
                follows = between.match(text, at)
                if follows is None:
                    break
                row, end = decode(text, follows.end())
                if type(row) is not dict:
                    break
                rows.append(row)
                at = end
        except (ValueError, RecursionError, _RepeatedKeyError):
            # the next row is not whole yet, or wrong: _next, which comes to it, reads on or says
            # why
            pass
        self._row += len(rows) - 1
        self._at = at
        return rows

    def _next(self) -> dict[str, Any]:
        """Return the object that begins here."""
        while True:
            try:
                row, end = self._decoder.raw_decode(self._text, self._at)
                break
            except json.JSONDecodeError as error:
                if len(self._text) - self._at > LARGEST_ROW:
                    raise self._wrong(
                        f"{error.msg} (a row may have {LARGEST_ROW} characters; of a whole table "
                        f"in one object, {CURE})",
                        error.pos,
                    ) from error
                if not self._more():
                    raise self._wrong(error.msg, error.pos) from error
            except _RepeatedKeyError as error:
                raise self._wrong(
                    f"an object has the key {error.args[0]!r:.100} twice", self._at
                ) from error
            except ValueError as error:  # a whole number of thousands of digits
                raise self._wrong(str(error), self._at) from error
            except RecursionError as error:
                raise self._wrong("its values are nested too deep", self._at) from error
        if type(row) is not dict:
            raise self._wrong("it is no object: expected {...} with the names of columns", self._at)
        self._at = end
        self._row += 1
        return row

    def _skip_space(self) -> bool:
        """Go on to what is no space; return whether there is something."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return True
            if not self._more():
                return False

    def _more(self) -> bool:
        """Read on, as much again as is held of a long row; return whether there was more."""
        pieces: list[str] = []
        length = 0
        while length <= len(self._text) - self._at:
            piece = next(self._texts, None)
            if piece is None:
                break
            pieces.append(piece)
            length += len(piece)
        if length == 0:
            return False
        self._before += self._at
        self._text = self._text[self._at :] + "".join(pieces)
        self._at = 0
        if _MINUS_ZERO.search(self._text):
            self._decoder = _decoder(_whole)
        return True

    def _wrong(self, what: str, at: int) -> DataError:
        """Return the error for a place in the text. To find its line the file is read again: that
        costs nothing of a file in which nothing is wrong.
        """
        place = self._before + at
        read = 0
        line = 1
        line_begins = 0
        for text in _texts(self._fs, self._path):
            line += text.count("\n", 0, place - read)
            last = text.rfind("\n", 0, place - read)
            if last >= 0:
                line_begins = read + last + 1
            read += len(text)
            if read >= place:
                break
        column = place - line_begins + 1
        where = f"row {self._row}, line {line}, column {column}"
        return DataError(f"{full_name(self._fs, self._path)} cannot be read: {where}: {what}")


def _decoder(parse_int: Callable[[str], int | bytes]) -> json.JSONDecoder:
    return json.JSONDecoder(
        object_pairs_hook=_object,
        parse_int=parse_int,
        parse_float=str.encode,
        parse_constant=str.encode,
    )


def _may_be_exact(lines: str) -> bool:
    if _NULL_ROW.search(lines) or _MINUS_ZERO.search(lines):
        return False
    return lines.startswith("{")


def _whole(text: str) -> int | bytes:
    if text == "-0":
        return text.encode()
    return int(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKeyError(next(name for name in names if names.count(name) > 1))
    return found
