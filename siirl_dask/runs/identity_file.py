"""``identity.json``: where a run's folder was when it was started last, what its data was, which
rows it has to have, and digests of its small files.

    {"version": 1,
     "url":    "/home/me/runs/quickstart",
     "files":  {"config.yaml": [bytes, SHA-256], "dag.json": [bytes, SHA-256]},
     "data":   {"data.url": {"version": null, "rows": 4096, "bytes": 88231, "digest": SHA-256, "content": SHA-256}},
     "models": {"model.path": SHA-256},
     "model_files": {"model.path": {"config.json": SHA-256, "tokenizer.json": SHA-256}},
     "tables": {"rollouts": ["train", 1], "validation": ["validation", 0]},
     "digests": ["0b5c9d7e1f2a3c4d"]}

Each start writes it, after the files that it has digests of; while it writes those, the file has
no digests, and the rest as before: a start that is killed meanwhile loses nothing. Runs of earlier versions have none:
they are resumed and checked without. ``retention.json`` beside it says which rows were deleted on
purpose.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

from siirl_storage import (
    FileDigest,
    Snapshot,
    StorageError,
    digest_file,
    join,
    open_fs,
    open_table,
    write_atomic,
)
from siirl_storage.files import absolute, at

from siirl_dask.config import Config
from siirl_dask.errors import ConfigError, clause, counted
from siirl_dask.models.shapes import description_digests, weights_digest
from siirl_dask.planner import Phase
from siirl_dask.tables.content import CONTENT, content_digest
from siirl_dask.wording import redacted

FILE = "identity.json"
RETENTION = "retention.json"
_VERSION = 1
_MOST_READ = 64 * 2**20  # bytes of plain files whose content is compared: a fraction of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class DataVersion:
    """The state of a table of prompts, as cheap to find as opening it."""

    version: int | None
    """Number of its snapshot; None for plain files, and for tables of Dask collections."""
    rows: int
    bytes: int
    digest: str
    """``Snapshot.digest``, or that of the rows of a Dask collection."""
    content: str | None = None
    """A digest of all bytes. None for plain files of more than 64 MiB, of which ``digest`` has sizes,
    names and statistics alone, and in runs of earlier versions."""

    @staticmethod
    def of(table: Snapshot) -> DataVersion:
        """Return the state of a table that is open.

        That of one which was written of a Dask collection is its rows: the same collection makes
        another table of the same state.
        """
        version = table.version
        digest = table.digest
        if CONTENT in table.properties:
            version = None
            digest = content_digest(table.schema, table.parts)
        nbytes = sum(part.nbytes for part in table.parts)
        content = None
        if all(part.sha256 for part in table.parts):
            content = digest
        elif table.version is None and nbytes <= _MOST_READ:
            content = _content_of(table)
        return DataVersion(
            version=version,
            rows=table.num_rows,
            bytes=nbytes,
            digest=digest,
            content=content,
        )

    def is_same(self, other: DataVersion) -> bool:
        """Return whether two states are the same, as far as both have recorded it."""
        if None in (self.content, other.content):
            return replace(self, content=None) == replace(other, content=None)
        return self == other

    def is_copy(self, other: DataVersion) -> bool:
        """Return whether tables in different places have the same content, by digests of all bytes:
        ``is_same`` is enough for what was in one place all the time.
        """
        if self.content is None:
            return False
        return self == other

    def __str__(self) -> str:
        version = ""
        if self.version is not None:
            version = f"version {self.version}, "
        return f"{version}{counted(self.rows, 'row')} in {self.bytes:,} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelVersion:
    """The state of a model that a run begins with."""

    weights: str = ""
    """``weights_digest``; empty where the machine that started the run saw none."""
    files: Mapping[str, str] = field(default_factory=dict)
    """``description_digests``; empty where it saw none, and in runs of earlier versions."""

    @staticmethod
    def of(path: str) -> ModelVersion:
        """Return the state of the model at ``path``, a folder or a URL."""
        return ModelVersion(weights=weights_digest(path), files=description_digests(path))

    def has_other_weights(self, before: ModelVersion) -> bool:
        """Return whether the weights are others than before, as far as both are known."""
        if "" in (self.weights, before.weights):
            return False
        return self.weights != before.weights

    def other_files(self, before: ModelVersion) -> list[str]:
        """Return the names of files that differ from before, as far as both states are known."""
        if not (self.files and before.files):
            return []
        names = sorted({*self.files, *before.files})
        return [name for name in names if self.files.get(name) != before.files.get(name)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DueTable:
    """A table that the run saves."""

    phase: Phase
    since: int
    """The first step of which it has rows: 1 in training, 0 in validation, or the one after
    which it was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityFile:
    """The content of the file."""

    files: Mapping[str, FileDigest] = field(default_factory=dict)
    data: Mapping[str, DataVersion] = field(default_factory=dict)
    """State of each table of prompts, by the configuration's key that names it, of one to
    validate on with its URL."""
    tables: Mapping[str, DueTable] = field(default_factory=dict)
    url: str = ""
    """Where the run's folder was at its last start: an absolute path or a URL, without secrets.
    Empty in a run of an earlier version."""
    models: Mapping[str, ModelVersion] = field(default_factory=dict)
    """State of each model that the run began with, by the configuration's key that names its folder
    or URL."""
    digests: Sequence[str] = ()
    """Digests of the run's identity in other places, where it was before: it is the same run, and
    what it wrote there is its own."""

    def write(self, url: str) -> None:
        """Write the file into the run's folder, ``url``."""
        fs, path = open_fs(join(url, FILE))
        document = {
            "version": _VERSION,
            "url": self.url,
            "files": {name: [one.nbytes, one.sha256] for name, one in self.files.items()},
            "data": {key: asdict(one) for key, one in self.data.items()},
            "tables": {name: [str(one.phase), one.since] for name, one in self.tables.items()},
            "models": {key: one.weights for key, one in self.models.items() if one.weights},
            "model_files": {key: {**one.files} for key, one in self.models.items() if one.files},
            "digests": [*self.digests],
        }
        write_atomic(fs, path, (json.dumps(document, indent=1) + "\n").encode())


def not_recorded(key: str) -> str:
    """Return a clause on a model of whose files the run has no record."""
    return f"the run has not recorded config and tokenizer of {key}, which may have been replaced"


def agent_model_key(agent: str) -> str:
    """Return the configuration's key that names the model of an agent."""
    return f"agents.{agent}.model.path"


def read_identity_file(url: str) -> IdentityFile | None:
    """Return what is recorded of the run at ``url``; None if it has no such file. ConfigError
    for a damaged one.
    """
    document = _read(url, FILE)
    if document is None:
        return None
    try:
        files = {
            name: FileDigest(_count(value[0]), _digest(value[1]))
            for name, value in document["files"].items()
        }
        data = {key: _data_version(value) for key, value in document["data"].items()}
        tables = {
            name: DueTable(phase=Phase(value[0]), since=_count(value[1]))
            for name, value in document["tables"].items()
        }
        models = _model_versions(document.get("models", {}), document.get("model_files", {}))
        place = document.get("url", "")
        if not isinstance(place, str):
            raise ValueError(f"{place!r:.80} is no URL")
        digests = [_short_digest(value) for value in document.get("digests", ())]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise _damaged(url, FILE, error) from error
    return IdentityFile(
        files=files, data=data, tables=tables, url=place, models=models, digests=digests
    )


@dataclass(frozen=True, slots=True)
class Relocation:
    """The folder of a run that was moved or copied since its last start: its files name places as
    they were then.
    """

    before: str
    """Absolute path or URL of the folder at the run's last start."""
    now: str

    def relocated(self, recorded: Any) -> Any:
        """Return plain data that the run recorded with each place in it as it is now.

        What was in the run's folder is still in it. Another file of this machine that is not there
        any more is where it was as seen from the run's folder, if something is there now: the run
        was moved along with it.
        """
        match recorded:
            case str():
                return self._place_of(recorded)
            case Mapping():
                return {name: self.relocated(value) for name, value in recorded.items()}
            case list():
                return [self.relocated(value) for value in recorded]
        return recorded

    def is_same(self, recorded: Any, given: Any) -> bool:
        """Return whether ``given``, plain data, is what the run recorded, with places that are the
        same as they were or the same as seen from the run's folder.
        """
        if recorded == given:
            return True
        match recorded, given:
            case str(), str():
                # secrets of where the run is now are left out of both
                return given in redacted([self._inside(recorded), self.along(recorded)])
            case Mapping(), Mapping() if recorded.keys() == given.keys():
                return all(self.is_same(value, given[name]) for name, value in recorded.items())
            case list(), list() if len(recorded) == len(given):
                return all(map(self.is_same, recorded, given))
        return False

    def _place_of(self, recorded: str) -> str:
        inside = self._inside(recorded)
        if inside is not None:
            return inside
        along = self.along(recorded)
        # any text may stand here: os.path takes those that can be no path
        if along is None or os.path.lexists(recorded) or not os.path.lexists(along):
            return recorded
        return along

    def _inside(self, recorded: str) -> str | None:
        """Return where a place in the run's folder is now; None for any other."""
        if recorded == self.before:
            return self.now
        start = join(self.before, "")
        if recorded.startswith(start):
            return join(self.now, recorded[len(start) :])
        return None

    def along(self, recorded: str) -> str | None:
        """Return where a place is now if it was moved with the run's folder; None for one that has
        only the root in common with it, and for URLs.
        """
        if not all(place.startswith("/") for place in (recorded, self.before, self.now)):
            return None
        if os.path.commonpath([recorded, self.before]) == "/":
            return None
        return os.path.normpath(f"{self.now}/{os.path.relpath(recorded, self.before)}")


def with_recorded_data(
    config: Config, recorded: Mapping[str, Any], data: Mapping[str, DataVersion]
) -> Config:
    """Return the configuration of a start with each table to train on named as the run has recorded
    it, if the one that it names has the same content: a copy somewhere else is the same data.

    ``recorded`` are the run's values by key, and ``data`` the states of its tables. ConfigError for
    a store that cannot be reached.
    """
    url = config.data.url
    before = recorded.get("data.url")
    if url is not None and before is not None and _is_copy(url, before, data.get("data.url")):
        config = replace(config, data=replace(config.data, url=before))
    sources = dict(config.data.sources)
    for name, source in sources.items():
        before = recorded.get("data.sources", {}).get(name, {}).get("url")
        if before is not None and _is_copy(source.url, before, data.get(f"data.sources.{name}")):
            sources[name] = replace(source, url=before)
    return replace(config, data=replace(config.data, sources=sources))


def _content_of(table: Snapshot) -> str:
    fs, path = open_fs(table.base)
    digests = []
    for part in table.parts:
        digests.append([part.path, digest_file(fs, at(path, part.path)).sha256])
    return sha256(json.dumps(digests).encode()).hexdigest()


def _is_copy(url: str, before: str, recorded: DataVersion | None) -> bool:
    """Return whether the table at another URL than ``before`` has the recorded state."""
    if recorded is None or redacted(url) == before:
        return False
    try:
        return DataVersion.of(open_table(url)).is_copy(recorded)
    except StorageError:  # none, or a damaged one: another one than the run's
        return False
    except Exception as error:  # drivers of remote storage raise exceptions of their own
        raise ConfigError(
            f"dataset {url!r}: its storage cannot be reached: {type(error).__name__}: {error}"
        ) from error


def relocation_of(url: str) -> Relocation | None:
    """Return how the run at ``url`` was moved since its last start; None where it was not, or where
    that is not recorded. ConfigError for a damaged record.
    """
    recorded = read_identity_file(url)
    now = absolute(url)
    if recorded is None or recorded.url in ("", redacted(now)):
        return None
    return Relocation(recorded.url, now)


def read_retention(url: str) -> dict[str, int]:
    """Return the last step whose rows were deleted on purpose, by table. ConfigError for a
    damaged file.
    """
    document = _read(url, RETENTION)
    if document is None:
        return {}
    try:
        return {name: _count(step) for name, step in document["removed"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(url, RETENTION, error) from error


def note_retention(url: str, removed: Mapping[str, int]) -> None:
    """Record that the rows of each table up to a step are about to be deleted on purpose."""
    before = read_retention(url)
    steps = dict(before)
    for name, step in removed.items():
        steps[name] = max(step, before.get(name, 0))
    if steps != before:
        fs, path = open_fs(join(url, RETENTION))
        write_atomic(
            fs,
            path,
            (json.dumps({"version": _VERSION, "removed": steps}, indent=1) + "\n").encode(),
        )


def _read(url: str, name: str) -> dict[str, Any] | None:
    fs, path = open_fs(join(url, name))
    try:
        document = json.loads(fs.cat_file(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise _damaged(url, name, error) from error
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise _damaged(
            url,
            name,
            ValueError(f"expected an object of version {_VERSION}, got {document!r:.100}"),
        )
    return document


def _damaged(url: str, name: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{join(url, name)} is not what a run writes there: {type(error).__name__}: {clause(error)}; "
        "restore it, or remove it: the run is then resumed and checked without it"
    )


def _model_versions(
    weights: Mapping[str, str], files: Mapping[str, Mapping[str, str]]
) -> dict[str, ModelVersion]:
    return {
        key: ModelVersion(
            weights=_digest(weights[key]) if key in weights else "",
            files={name: _digest(value) for name, value in files.get(key, {}).items()},
        )
        for key in {**weights, **files}
    }


def _data_version(value: Mapping[str, Any]) -> DataVersion:
    number = value["version"]
    version = None
    if number is not None:
        version = _count(number)
    rows = _count(value["rows"])
    content = value.get("content")
    if content is not None:
        content = _digest(content)
    return DataVersion(
        version=version,
        rows=rows,
        bytes=_count(value["bytes"]),
        digest=_digest(value["digest"]),
        content=content,
    )


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} is no whole number from 0")
    return value


def _short_digest(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{16}", value):
        raise ValueError(f"{value!r:.80} is no digest of a run")
    return value


def _digest(value: object) -> str:
    if not isinstance(value, str) or len(value) != 64:
        raise ValueError(f"{value!r:.80} is no SHA-256")
    return value
