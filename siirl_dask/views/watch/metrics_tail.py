"""Follows ``metrics.jsonl`` of a run that may be on another machine: each look asks for the
bytes that came since.
"""

from __future__ import annotations

from siirl_storage import join, open_fs

from siirl_dask.observe import METRICS_FILE, Record, decode, last_records, whole_lines

_MOST = 2**23  # bytes of the end of the file that are read at first, about 5,000 steps
_HEAD = 2**17  # bytes of its beginning, if there are more


class MetricsTail:
    """Holds the records of a run that were seen so far.

    A start of the run may replace the file, which drops lines. So each time the last line that was
    read is read again, and if it is another one now, so is the whole file.
    """

    def __init__(self, url: str, most: int = _MOST) -> None:
        self._name = join(url, METRICS_FILE)
        self._fs, self._path = open_fs(self._name)
        self._most = most
        self._forget()

    @property
    def records(self) -> list[Record]:
        """The records that count, by step."""
        return [record for record, _ in last_records(self._seen)]

    def look(self) -> bool:
        """Read what came since the last look, and return whether anything did. DataError for a line
        that is no record.

        At first, the beginning and the end of a file that is too long are read; ``has_gap`` then
        says so.
        """
        try:
            if self._last:
                return self._read_on()
            return self._read_anew()
        except FileNotFoundError:
            had = bool(self._seen)
            self._forget()
            return had

    def _forget(self) -> None:
        self._seen: list[tuple[Record, int]] = []
        self._end = 0
        self._last = b""
        self.has_gap = False
        """True if records between the beginning and the end were left out."""

    def _read_on(self) -> bool:
        begin = self._end - len(self._last)
        try:
            came: bytes = self._fs.cat_file(self._path, start=begin)
        except FileNotFoundError:
            raise
        except OSError:
            # object stores refuse a range behind the end of a file that has become shorter
            came = b""
        if not came.startswith(self._last):
            return self._read_anew()
        return self._take(came[len(self._last) :])

    def _read_anew(self) -> bool:
        self._forget()
        size = int(self._fs.info(self._path)["size"])
        if size <= self._most:
            return self._take(self._fs.cat_file(self._path))
        self._take(self._fs.cat_file(self._path, start=0, end=min(_HEAD, self._most // 2)))
        self.has_gap = True
        self._end = size - self._most
        tail: bytes = self._fs.cat_file(self._path, start=self._end)
        cut = tail.find(b"\n") + 1  # within a line
        self._end += cut
        return self._take(tail[cut:])

    def _take(self, text: bytes) -> bool:
        whole = whole_lines(text)
        lines = whole.splitlines(keepends=True)
        self._seen += [decode(line, f"{self._name}, a line of {len(line)} bytes") for line in lines]
        self._end += len(whole)
        if lines:
            self._last = lines[-1]
        return bool(lines)
