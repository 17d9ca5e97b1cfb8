"""One start of a run at a time: each start takes the run's folder as an attempt, and fences those before it.

    <run.url>/attempts/0003.json    created exclusively: the third start, its host, process, user and time
                       0003.beat    written anew every few seconds while it lives, and a last time when it ends

The start with the highest number has the folder. One that finds a higher number, or whose own file is gone or has
another start's token, is fenced: it writes and deletes nothing more. The number alone would not do: in a folder that
was removed or moved, numbers begin again at 1. Whether an attempt lives is judged by one clock, that of the start which
wants the folder: it watches whether the beat changes. Neither the clocks of two hosts nor a store's times are compared.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import Conflict, join, list_files, open_fs, remove_file, write_atomic

from siirl_dask.errors import ConfigError, Fenced, FolderGone, RunInProgress
from siirl_dask.observe import SUMMARY_FILE
from siirl_dask.runs.attempt_folder import FOLDER, AttemptFolder, name_of, names_in
from siirl_dask.runs.owner import Owner

logger = logging.getLogger("siirl_dask.runs")
_WRITTEN_BY = re.compile(
    r"checkpoints/step=\d{6,}-(\d{4,8})/(?:BEGUN|COMMITTED)|(?:.+/)?(?:part-(\d{4,})-\d+\.parquet|_parts-(\d{4,})\.json)",
    re.ASCII,
)
"""Names of files that carry the number of the attempt that wrote them."""
_BEATS = 6  # in the time after which an attempt without one may be taken over
_LOOKS = 24  # at the beat in that time
_ENDED = b"ended\n"
# seconds before a second look for a record: a store's reading, or NFS, may be behind for a moment
_PAUSE = 1.0


@dataclass(slots=True)
class Attempt:
    """A start of the run at ``url``. Used with ``with``, it renews itself, and says at the end
    that it is over.
    """

    url: str
    number: int
    owner: Owner
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the number changes, and while a sign of life is written under it."""
    _seen: tuple[object, ...] | None = None
    """State of this attempt's file, as the store's listing has it, when the token in it was
    compared last."""
    _gone: bool = False
    """True once its file was gone, or another start's: it gives no sign of life there any more."""
    _opened: int | None = None
    """Descriptor of the folder of attempts on a local disk, which follows that folder wherever
    it is moved."""

    def check(self) -> None:
        """Raise Fenced if another start has taken the folder, FolderGone if it was moved or
        removed.
        """
        fenced = self._fenced()
        if fenced is not None:
            raise fenced

    def begin_again(self) -> None:
        """Take the folder under a new number: processes of before may still write, and no record
        will list that.

        Fenced if another start has taken it.
        """
        with self._lock:
            self.check()
            folder = AttemptFolder.of_run(self.url)
            following = Owner.here(self.owner.lease)
            try:
                folder.add(self.number + 1, following)
            except Conflict:
                self.check()
                raise
            self.owner = following
            self.number += 1
            self._seen = None

    def holds(self) -> bool:
        """Return whether the folder is there, and no other start has taken it."""
        return self._fenced() is None

    def _fenced(self) -> Fenced | None:
        """Return why this start has the folder no more; None while it has it.

        That is one listing. The file itself is read where the store says that it has changed, or
        nothing at all of it.
        """
        folder = AttemptFolder.of_run(self.url)
        records = folder.records()
        tag = records.get(self.number)
        if tag is None or tag != self._seen:
            if not self._has_own_token(folder):
                self._gone = True
                return self._folder_gone(folder)
            self._seen = tag
        newest = max(records, default=0)
        if newest <= self.number:
            return None
        return Fenced(
            f"run.url={self.url!r} was taken over by {folder.read(newest)}: this start, "
            f"attempt {self.number}, gave no sign of life for {self.owner.lease:g} s (run.lease). "
            "It ends here, it commits and deletes nothing more, and what it has committed stays"
        )

    def _has_own_token(self, folder: AttemptFolder) -> bool:
        """Return whether this attempt's file is there and its own. One that is not there is
        looked for twice.
        """
        with suppress(FileNotFoundError):
            return self._is_own(folder)
        time.sleep(_PAUSE)
        try:
            return self._is_own(folder)
        except FileNotFoundError:
            return False

    def _is_own(self, folder: AttemptFolder) -> bool:
        """Return whether this attempt's file has its token. FileNotFoundError where there is
        none.
        """
        try:
            return folder.read(self.number).token == self.owner.token
        except ConfigError:
            return False  # this start wrote a whole one

    def _folder_gone(self, folder: AttemptFolder) -> FolderGone:
        record = folder.record(self.number)
        try:
            found = f"is that of {folder.read(self.number)}"
        except FileNotFoundError:
            found = "is gone"
        except ConfigError:
            found = "is another file"
        now_at = self._now_at()
        moved = "was moved or removed"
        if now_at is not None:
            moved = f"was moved to {now_at}"
        return FolderGone(
            f"run.url={self.url!r} {moved} under this start, attempt {self.number}: its record "
            f"{record} {found}. It ends here, and commits and deletes nothing more",
            now_at,
        )

    def _now_at(self) -> str | None:
        """Return where the run's folder is now, if it was moved on a local disk; None where
        nobody knows.
        """
        if self._opened is None:
            return None
        with suppress(OSError):
            attempts = Path(f"/proc/self/fd/{self._opened}").readlink()
            fs, path = open_fs(str(attempts))
            moved = AttemptFolder(fs, path)
            if attempts.name != FOLDER or path == AttemptFolder.of_run(self.url).path:
                return None
            if self._is_own(moved):
                return str(attempts.parent)
        return None

    def __enter__(self) -> Attempt:
        folder = AttemptFolder.of_run(self.url)
        if isinstance(folder.fs, LocalFileSystem):
            with suppress(OSError):
                self._opened = os.open(folder.path, os.O_RDONLY)
        self._thread = threading.Thread(target=self._renew, name="siirl-attempt", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._over.set()
        self._thread.join(self.owner.lease)
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None
        try:
            if not self._is_own(AttemptFolder.of_run(self.url)):
                return  # another start's sign of life is under this number
            if not self._withdraw():
                self._write(_ENDED)
        except FileNotFoundError:
            return  # the folder was moved or removed
        except Exception as failure:
            # each store has errors of its own; the next start finds out by waiting
            logger.warning("attempt %d could not say that it is over: %s", self.number, failure)

    def _withdraw(self) -> bool:
        """Remove this attempt where the run's folder has nothing else: a start that was refused
        leaves no folder.
        """
        folder = AttemptFolder.of_run(self.url)
        own = (folder.record(self.number), folder.beat(self.number))
        if names_in(folder.fs, folder.run) != {FOLDER}:
            return False
        if not folder.names() <= {name_of(path) for path in own}:
            return False
        for path in own:
            remove_file(folder.fs, path)
        if isinstance(folder.fs, LocalFileSystem):
            with suppress(OSError):  # something is there by now
                folder.fs.rmdir(folder.path)
                folder.fs.rmdir(folder.run)
        return True

    def _renew(self) -> None:
        beat = 0
        warned = False
        while not self._over.wait(self.owner.lease / _BEATS):
            beat += 1
            try:
                with self._lock:
                    if not self._gone:
                        self._write(b"%d\n" % beat)
                warned = False
            except Exception as error:  # the store may be back for the next one
                if not warned:
                    logger.warning(
                        "attempt %d could not be renewed: %s: %s",
                        self.number,
                        type(error).__name__,
                        error,
                    )
                warned = True

    def _write(self, beat: bytes) -> None:
        folder = AttemptFolder.of_run(self.url)
        write_atomic(folder.fs, folder.beat(self.number), beat)


@dataclass(frozen=True, slots=True)
class RunStart:
    """A start of a run as others see it."""

    number: int
    owner: Owner
    beat: bytes = b""
    """Its last sign of life, which changes while it lives; empty where it was not read, or gave
    none yet."""

    @property
    def is_over(self) -> bool:
        """Whether it said that it has ended, or its process has certainly gone; False where
        neither is known.
        """
        if self.beat == _ENDED:
            return True
        return self.owner.is_gone()


def starts_of(url: str, most: int) -> list[RunStart]:
    """Return the newest ``most`` starts of the run at ``url``, ascending, without their signs of
    life.

    ConfigError for a damaged file.
    """
    folder = AttemptFolder.of_run(url)
    found = []
    for number in sorted(folder.numbers())[-most:]:
        with suppress(FileNotFoundError):  # it had written nothing, and has left
            found.append(RunStart(number, folder.read(number)))
    return found


def newest_start(url: str) -> RunStart | None:
    """Return the newest start of the run at ``url``; None where no file tells of one.
    ConfigError for a damaged one.
    """
    folder = AttemptFolder.of_run(url)
    newest = folder.newest()
    if not newest:
        return None
    try:
        return RunStart(newest, folder.read(newest), folder.read_beat(newest))
    except FileNotFoundError:
        return None


def summary_is_older(url: str) -> bool:
    """Return whether the summary of the run at ``url`` is of a start before the newest: written
    before that one took the folder, by the clock of the store.
    """
    folder = AttemptFolder.of_run(url)
    newest = folder.newest()
    if not newest:
        return False
    fs, summary = open_fs(join(url, SUMMARY_FILE))
    return bool(fs.modified(summary) < fs.modified(folder.record(newest)))


def take(url: str, lease: float, note: Callable[[str], None]) -> Attempt:
    """Take the folder of the run at ``url`` for this process, as its newest attempt.

    An attempt whose process is gone, on this host, is taken over at once; any other when it gave no
    sign of life for as many seconds as its own lease says, and ``note`` is told of the wait.
    RunInProgress, naming host and process, while it is alive.
    """
    folder = AttemptFolder.of_run(url)
    me = Owner.here(lease)
    while True:
        newest = folder.newest()
        if newest and not _is_over(folder, newest, url, note):
            continue  # another start was faster
        number = _number_used(folder, newest) + 1
        try:
            folder.add(number, me)
        except Conflict:
            continue
        return Attempt(url, number, me)


def is_held(url: str, note: Callable[[str], None]) -> bool:
    """Return whether a start that is alive has the folder at ``url``, which stays as it is.

    One of another host is waited for as ``take`` does, and ``note`` is called with a sentence about
    that.
    """
    folder = AttemptFolder.of_run(url)
    try:
        while newest := folder.newest():
            if _is_over(folder, newest, url, note):
                return False
    except RunInProgress:
        return True
    return False


def _number_used(folder: AttemptFolder, newest: int) -> int:
    """Return the highest number of an attempt of which anything is left, ``newest`` being that of
    the newest record.

    Records may be missing, and what a start wrote under a number must not be taken for what another
    one writes. Where all are, every file of the run is looked at; a new run has none.
    """
    beats = folder.beat_numbers()
    if newest or beats:
        return max([newest, *beats])
    files = list_files(folder.fs, folder.run)
    written = filter(None, map(_WRITTEN_BY.fullmatch, files))
    newest = 0
    for matched in written:
        numbers = [int(number) for number in matched.groups() if number]
        newest = max([newest, *numbers])
    return newest


def _is_over(folder: AttemptFolder, number: int, url: str, note: Callable[[str], None]) -> bool:
    """Return True when attempt ``number`` is over, False when it is no longer the newest, or
    raise RunInProgress.
    """
    try:
        owner = folder.read(number)
    except FileNotFoundError:
        return False  # it had written nothing, and has left
    first = folder.read_beat(number)
    if first == _ENDED or owner.is_gone():
        return True
    note(
        f"waiting for up to {owner.lease:g} s for a sign of life of {owner}, attempt {number} at "
        "this run (run.lease)"
    )
    deadline = time.monotonic() + owner.lease
    while time.monotonic() < deadline:
        time.sleep(owner.lease / _LOOKS)
        beat = folder.read_beat(number)
        if beat == _ENDED or owner.is_gone():
            return True
        if beat and beat != first:  # it has none when it has just begun, or leaves
            raise RunInProgress(
                f"run.url={url!r} is being trained, by {owner}, attempt {number}: stop that one "
                "first, or choose another run.name or run.url"
            )
        if folder.newest() != number:
            return False
    return True
