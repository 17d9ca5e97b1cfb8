"""The folder of a run's attempts: which files it has, and what is in them (``attempt.py`` says what they
mean).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fsspec import AbstractFileSystem
from siirl_storage import join, open_fs, write_exclusive

from siirl_dask.errors import ConfigError, clause
from siirl_dask.runs.owner import Owner

FOLDER = "attempts"
_RECORD = re.compile(r"(\d{4,})\.json", re.ASCII)
_BEAT = re.compile(r"(\d{4,})\.beat", re.ASCII)
_TAGS = ("ETag", "etag", "md5Hash", "LastModified", "last_modified", "mtime", "ino")
"""Keys under which fsspec's stores say what changes with a file."""


@dataclass(frozen=True, slots=True)
class AttemptFolder:
    """The folder at ``path`` of a store."""

    fs: AbstractFileSystem
    path: str

    @classmethod
    def of_run(cls, url: str) -> AttemptFolder:
        """Return the folder of the run at ``url``, which need not be there."""
        fs, path = open_fs(join(url, FOLDER))
        return cls(fs, path)

    @property
    def run(self) -> str:
        """Path of the run's own folder."""
        return self.path.rpartition("/")[0]

    def record(self, number: int) -> str:
        """Return the path of an attempt's record."""
        return f"{self.path}/{number:04d}.json"

    def beat(self, number: int) -> str:
        """Return the path of an attempt's signs of life."""
        return f"{self.path}/{number:04d}.beat"

    def add(self, number: int, owner: Owner) -> None:
        """Write the record of a new attempt. Conflict where that number has one."""
        write_exclusive(self.fs, self.record(number), owner.to_json())

    def read(self, number: int) -> Owner:
        """Return who has made an attempt. FileNotFoundError without a record, ConfigError for a
        damaged one.
        """
        path = self.record(number)
        try:
            return Owner.from_json(self.fs.cat_file(path))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{path} does not say who trains this run: {clause(error)}; if nobody does, remove the file"
            ) from error

    def read_beat(self, number: int) -> bytes:
        """Return an attempt's last sign of life; empty where it has just begun."""
        try:
            content: bytes = self.fs.cat_file(self.beat(number))
        except FileNotFoundError:
            return b""
        return content

    def names(self) -> set[str]:
        """Return the names of what lies in the folder."""
        return names_in(self.fs, self.path)

    def numbers(self) -> list[int]:
        """Return the numbers of attempts that have a record, in any order."""
        return self._numbers_in(_RECORD)

    def newest(self) -> int:
        """Return the highest of these numbers; 0 if there is none."""
        return max(self.numbers(), default=0)

    def beat_numbers(self) -> list[int]:
        """Return the numbers of attempts that have given signs of life, in any order."""
        return self._numbers_in(_BEAT)

    def _numbers_in(self, pattern: re.Pattern[str]) -> list[int]:
        found = map(pattern.fullmatch, self.names())
        return [int(matched[1]) for matched in found if matched is not None]

    def records(self) -> dict[int, tuple[object, ...] | None]:
        """Return for each attempt that has a record what the store says of it; None where that
        does not tell two apart.
        """
        try:
            entries: list[dict[str, Any]] = self.fs.ls(self.path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        named = ((_RECORD.fullmatch(name_of(str(entry["name"]))), entry) for entry in entries)
        return {int(matched[1]): _tag(entry) for matched, entry in named if matched}


def names_in(fs: AbstractFileSystem, path: str) -> set[str]:
    """Return the names of what lies in a folder; none where it is not there."""
    try:
        return {name_of(item) for item in fs.ls(path, detail=False)}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def name_of(path: str) -> str:
    """Return the last step of a path."""
    return path.rstrip("/").rpartition("/")[2]


def _tag(entry: dict[str, Any]) -> tuple[object, ...] | None:
    tag = tuple(entry.get(key) for key in _TAGS)
    if tag.count(None) == len(tag):
        return None
    return (entry.get("size"), *tag)
