"""A run's checkpoints: where they are stored, which are complete, and which are kept.

    <run.url>/checkpoints/step=000010-0003/policy/      the role's tensors: see training/files/checkpoint.py
                                           state.json   everything that is no tensor: see checkpoint_state.py
                                           COMMITTED    created last, with all digests: see commit_record.py
                                           BEGUN        created first: it is being written, or was

Attempt 3 alone writes to a folder that ends with its number. A process of it may live on and write there at any time,
also after attempt 4 has taken the run over (see attempt.py). So attempt 4 writes the same step to a folder of its own,
and voids that of attempt 3 before it removes anything there. Where two attempts have committed a step, the later one's
counts.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from fsspec import AbstractFileSystem
from siirl_storage import (
    Conflict,
    FileDigest,
    digest_file,
    join,
    list_files,
    open_fs,
    remove_file,
    remove_tree,
    write_atomic,
    write_exclusive,
)

from siirl_dask.errors import CheckpointError, DamagedCheckpoint, Fenced
from siirl_dask.runs.attempt import Attempt
from siirl_dask.runs.checkpoint_state import CheckpointState
from siirl_dask.runs.commit_record import NAME, CommitRecord

logger = logging.getLogger("siirl_dask.runs")
FOLDER = "checkpoints"
STATE = "state.json"
BEGUN = "BEGUN"
"""Name of the file that is created first in a checkpoint's folder."""
_NAME = re.compile(r"step=(\d{6,})(?:-(\w+))?", re.ASCII)
_NUMBER = re.compile(r"\d{4,8}", re.ASCII)
_READERS = 4  # files read at once: one core digests faster than most stores give a single stream


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with a commit record."""

    url: str
    step: int
    attempt: int
    """Attempt that wrote it; 0 for one of an earlier version."""
    record: CommitRecord | None
    """None when the record cannot be read."""
    damage: str = ""
    """Description of a damaged record; empty for a whole one."""

    def files(self, roles: Collection[str] | None = None) -> dict[str, FileDigest]:
        """Return the digests of the files by path in the folder; only those of ``roles``, if
        given.
        """
        listed = self.record.files if self.record else {}
        return {
            name: one
            for name, one in listed.items()
            if roles is None or PurePosixPath(name).parts[0] in roles
        }

    def state(self) -> CheckpointState:
        """Return ``state.json``. DamagedCheckpoint if it is not what was written,
        CheckpointError if it is unusable.
        """
        if self.record is None:
            raise DamagedCheckpoint(self.damage)
        url = join(self.url, STATE)
        fs, path = open_fs(url)
        try:
            data = fs.cat_file(path)
            written = self.record.files.get(STATE)
            if written and FileDigest.of(data) != written:
                raise DamagedCheckpoint(_differs(url, FileDigest.of(data), written))
            return CheckpointState.from_json(data, self.step)
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{url} is gone") from error
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{url} is not a checkpoint's state: {type(error).__name__}: {error}"
            ) from error

    def verify(self, roles: Collection[str] | None = None) -> None:
        """Read every file, or those of ``roles``, and compare digests. DamagedCheckpoint names
        one that differs.
        """
        if self.record is None:
            raise DamagedCheckpoint(self.damage)
        files = self.files(roles)
        with ThreadPoolExecutor(_READERS) as pool:
            for damage in pool.map(partial(_damage, self.url), files.keys(), files.values()):
                if damage:
                    raise DamagedCheckpoint(damage)


def damage_of(url: str, files: Mapping[str, FileDigest]) -> str:
    """Return what is wrong with the first of ``files`` below ``url`` that is not what was
    written; empty if none is.
    """
    return next(filter(None, (_damage(url, name, written) for name, written in files.items())), "")


def _damage(url: str, name: str, written: FileDigest) -> str:
    fs, path = open_fs(join(url, name))
    try:
        found = digest_file(fs, path)
    except FileNotFoundError:
        return f"{join(url, name)} is gone"
    if found == written:
        return ""
    return _differs(join(url, name), found, written)


def _differs(url: str, found: FileDigest, written: FileDigest) -> str:
    if found.nbytes != written.nbytes:
        return f"{url} has {found.nbytes} bytes, and {written.nbytes} were written"
    return f"{url} has the SHA-256 {found.sha256[:16]}..., and {written.sha256[:16]}... was written"


def find_checkpoints(run_url: str) -> list[Checkpoint]:
    """Return the checkpoints of the run at ``run_url`` by step, one for each; also those whose
    record is damaged.
    """
    chosen = {found.step: found for found in _found(run_url)}
    return [chosen[step] for step in sorted(chosen)]


def committed(run_url: str) -> list[int]:
    """Return the steps of the complete checkpoints of the run at ``run_url``, ascending."""
    return [found.step for found in find_checkpoints(run_url) if found.record]


def unfinished_steps(run_url: str) -> set[int]:
    """Return the steps of the checkpoints that were begun and not committed."""
    complete = {found.url.rpartition("/")[2] for found in _found(run_url)}
    return {step for name, step, _ in _folders(*_root(run_url)) if name not in complete}


def kept_folders(run_url: str) -> set[str]:
    """Return the names of the folders of all complete checkpoints, and of those whose record is
    damaged.
    """
    return {found.url.rpartition("/")[2] for found in _found(run_url)}


def find_checkpoint(run_url: str, step: int) -> Checkpoint:
    """Return the checkpoint of ``step``. CheckpointError if there is none."""
    there = {found.step: found for found in find_checkpoints(run_url)}
    if step not in there:
        raise CheckpointError(
            f"{run_url!r} has no complete checkpoint of step {step} (there are: {sorted(there)})"
        )
    return there[step]


def checkpoint_url(run_url: str, step: int) -> str:
    """Return the folder of the complete checkpoint of ``step``; each role has a folder in it.

    CheckpointError if there is no such checkpoint.
    """
    return find_checkpoint(run_url, step).url


def read_state(run_url: str, step: int) -> CheckpointState:
    """Return ``state.json`` of the checkpoint of ``step``. CheckpointError when it is absent or
    unreadable.
    """
    return find_checkpoint(run_url, step).state()


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Commits and prunes the checkpoints of one attempt at a run."""

    attempt: Attempt
    keep: int
    """Number of newest checkpoints that stay."""
    keep_best: str | None = None
    """Metric whose highest value keeps one more checkpoint."""
    done: int = 0
    """Step after which the attempt resumed; what earlier ones wrote of later steps is
    superseded."""

    def folder(self, step: int) -> str:
        """Return the URL of the folder for the checkpoint of ``step``, to which nobody else writes.

        A file in it says that it is being written. A store may show nothing else of it until it is
        whole, and a start that comes upon it must not take it for one that was lost.
        """
        url = join(self.attempt.url, FOLDER, f"step={step:06d}-{self.attempt.number:04d}")
        fs, path = open_fs(url)
        with suppress(OSError):  # the workers, which write there next, say what is wrong with it
            write_atomic(fs, f"{path}/{BEGUN}", b"")
        return url

    def commit(self, url: str, state: CheckpointState, files: Mapping[str, FileDigest]) -> None:
        """Complete the checkpoint at ``url``, of which all roles' ``files`` are written, and delete
        those not kept.

        Fenced if another start has taken the run over, CheckpointError if a file is not there as it
        was written.
        """
        fs, path = open_fs(url)
        self._check_sizes(fs, path, files)
        self.attempt.check()
        text = state.to_json()
        try:
            write_atomic(fs, f"{path}/{STATE}", text)
            record = CommitRecord(
                step=state.step, files={**files, STATE: FileDigest.of(text)}
            ).to_json()
            self.attempt.check()
            write_exclusive(fs, f"{path}/{NAME}", record)
        except Conflict as error:
            self.attempt.check()
            raise Fenced(f"{url} was voided by a later start of this run") from error
        except OSError:
            # a start that took over empties the folder, also under a file that is being written
            self.attempt.check()
            raise
        try:
            self._prune()
        except (
            OSError,
            CheckpointError,
        ) as error:  # the next commit tries again; what is committed costs no run
            where = self.attempt.url
            kind = type(error).__name__
            logger.warning("checkpoints that are not kept stay at %s: %s: %s", where, kind, error)

    def _check_sizes(
        self,
        fs: AbstractFileSystem,
        path: str,
        files: Mapping[str, FileDigest],
    ) -> None:
        there = list_files(fs, path)
        for name, written in files.items():
            if there.get(name) != written.nbytes:
                self.attempt.check()  # a start that took over has emptied the folder
                found = "is not there"
                if name in there:
                    found = f"has {there[name]} bytes"
                raise CheckpointError(f"{path}/{name} {found}, and {written.nbytes} were written")

    def _prune(self) -> None:
        """Delete complete checkpoints that are not kept, and what earlier attempts left
        incomplete or superseded.
        """
        number = self.attempt.number
        complete = [found for found in _found(self.attempt.url) if found.record]
        line = {one.step: one for one in complete if one.step <= self.done or one.attempt == number}
        ordered = [line[step] for step in sorted(line)]
        kept = {one.url for one in ordered[-self.keep :]} | self._best(ordered)
        there = {one.url for one in complete}
        fs, root = _root(self.attempt.url)
        for name, step, attempt in sorted(_folders(fs, root), key=lambda folder: folder[1:]):
            url = join(self.attempt.url, FOLDER, name)
            if url in kept or attempt > number or (attempt == number and url not in there):
                continue  # kept, of a later start, or being written
            self.attempt.check()
            if url in there:
                _remove(fs, f"{root}/{name}")
            else:
                self._void(fs, f"{root}/{name}", step)

    def _void(self, fs: AbstractFileSystem, folder: str, step: int) -> None:
        """Empty the incomplete folder of an earlier attempt, once a record says that it will
        never count.
        """
        path = f"{folder}/{NAME}"
        if not fs.exists(path):
            try:
                write_exclusive(
                    fs, path, CommitRecord(step=step, voided_by=self.attempt.number).to_json()
                )
            except Conflict:
                return  # it was committed at this moment
        for name in list_files(fs, folder):
            if name != NAME:
                remove_file(fs, f"{folder}/{name}")

    def _best(self, complete: Sequence[Checkpoint]) -> set[str]:
        """Return the URL of the checkpoint with the highest ``keep_best``, the first of equals."""
        if self.keep_best is None:
            return set()
        values: dict[str, float] = {}
        for one in complete:
            try:
                metrics = one.state().metrics
            except CheckpointError as error:
                logger.warning(
                    "the checkpoint of step %d cannot be the best one: %s", one.step, error
                )
                continue
            if self.keep_best in metrics:
                values[one.url] = metrics[self.keep_best]
        if values:
            return {max(values, key=values.__getitem__)}
        return set()


def remove_all(run_url: str) -> None:
    """Delete every checkpoint of the run, the newest first: a crash leaves none newer than those
    deleted.
    """
    fs, root = _root(run_url)
    for name, _, _ in sorted(_folders(fs, root), key=lambda folder: folder[1:], reverse=True):
        _remove(fs, f"{root}/{name}")


def _root(run_url: str) -> tuple[AbstractFileSystem, str]:
    return open_fs(join(run_url, FOLDER))


def _folders(fs: AbstractFileSystem, root: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, step and attempt of every checkpoint folder, complete or not."""
    try:
        listed = fs.ls(root, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in listed:
        name = str(path).rstrip("/").rpartition("/")[2]
        matched = _NAME.fullmatch(name)
        if matched:
            yield (
                name,
                int(matched[1]),
                int(matched[2]) if _NUMBER.fullmatch(matched[2] or "") else 0,
            )


def _found(run_url: str) -> list[Checkpoint]:
    """Return every folder that has a record and is not void, by step and attempt."""
    fs, root = _root(run_url)
    found = []
    for name, step, attempt in sorted(
        _folders(fs, root), key=lambda folder: (*folder[1:], folder[0])
    ):
        try:
            data = fs.cat_file(f"{root}/{name}/{NAME}")
        except (FileNotFoundError, NotADirectoryError):
            continue
        url = join(run_url, FOLDER, name)
        record = None
        damage = ""
        try:
            record = CommitRecord.from_json(data, step)
        except (ValueError, RecursionError) as error:
            damage = f"{url}/{NAME} is not a checkpoint's record: {error}"
        if record is None or record.voided_by is None:
            found.append(Checkpoint(url, step, attempt, record, damage))
    return found


def _remove(fs: AbstractFileSystem, folder: str) -> None:
    """Delete a checkpoint, its record first: a crash in between leaves nothing that looks
    complete.
    """
    remove_file(fs, f"{folder}/{NAME}")
    remove_tree(fs, folder)
