"""A filesystem that fails on purpose: ``faulty://`` before another one's path, for tests of what uses a store.

    plan = Plan("/tmp/plan.json")
    plan.set(at=7, how=How.AFTER)
    inject(plan.file)                       # in every process that uses the store
    run("faulty:///tmp/run")                # or faulty://bucket/run, with inject(plan.file, target="s3")
    plan.operations()                       # what was done, over all processes

It is like an object store: a write is seen whole or not at all, and only when it ends; a file can be created
exclusively.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.config import conf
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from siirl_storage.files import written_aside

_PROTOCOL = "faulty"


class How(StrEnum):
    """Ways in which an operation fails."""

    BEFORE = "before"
    """An error that passes, and nothing was done."""
    AFTER = "after"
    """An error that passes, and it was done: the answer was lost."""
    KILL_BEFORE = "kill before"
    """SIGKILL of the process, and nothing was done."""
    KILL_AFTER = "kill after"
    """SIGKILL of the process when it was done."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Says which operation fails, of all that the processes with this plan do, and lists those
    that were done.
    """

    file: str

    def set(self, at: int = 0, how: How = How.BEFORE, *, always: str = "", but: str = "") -> None:
        """Let operation ``at`` fail, counted from 1, and each like ``always``; begin to count anew.

        ``always`` is a pattern (``fnmatch``) of an operation's name and path, such as ``rm
        */checkpoints/*``. Operations on paths that end with ``but`` are not counted and do not
        fail.
        """
        Path(self.file).write_text(json.dumps({"at": at, "how": how, "always": always, "but": but}))
        self._log.unlink(missing_ok=True)

    def operations(self) -> list[tuple[str, str, int]]:
        """Return name, path and process of each operation that was begun, in order."""
        lines = (line.split(" ", 2) for line in self._log.read_text().splitlines())
        return [(name, path, int(pid)) for name, pid, path in lines]

    def count(self, name: str, path: str) -> How | None:
        """Note an operation, and return how it fails."""
        plan = json.loads(Path(self.file).read_text())
        if plan["but"] and path.endswith(plan["but"]):
            return None
        with self._log.open("a+") as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            log.seek(0)
            number = sum(1 for _ in log) + 1
            log.write(f"{name} {os.getpid()} {path}\n")
        if number == plan["at"] or fnmatch(f"{name} {path}", plan["always"]):
            return How(plan["how"])
        return None

    @property
    def _log(self) -> Path:
        return Path(f"{self.file}.log")


def inject(file: str, target: str = "file", **options: Any) -> None:
    """Make ``faulty://`` known in this process, with the plan in ``file`` and the filesystem
    ``target`` below it.
    """
    fsspec.register_implementation(_PROTOCOL, FaultyFileSystem, clobber=True)
    conf[_PROTOCOL] = {"plan": file, "target": target, "options": options}


class FaultyFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Does what ``target`` does, but for the operation that ``plan`` lets fail."""

    protocol = _PROTOCOL
    cachable = False

    def __init__(
        self,
        plan: str,
        target: str = "file",
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.plan = FaultPlan(plan)
        self.fs = fsspec.filesystem(target, **(options or {}))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._do("info", path, self.fs.info, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self._do("ls", path, self.fs.ls, detail=detail, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self._do("find", path, self.fs.find, *args, **kwargs)

    def glob(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return self._do("glob", path, self.fs.glob, *args, **kwargs)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> Any:
        return self._do("cat_file", path, self.fs.cat_file, start=start, end=end)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._do("create" if mode == "create" else "pipe_file", path, self._write, value, mode)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._do("cp_file", path1, self.fs.cp_file, self._strip_protocol(path2), **kwargs)

    def rm_file(self, path: str) -> None:
        self._do("rm_file", path, self.fs.rm_file)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        self._do("rm", path, self.fs.rm, recursive=recursive, maxdepth=maxdepth)

    def rmdir(self, path: str) -> None:
        self._do("rmdir", path, self.fs.rmdir)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._do("makedirs", path, self.fs.makedirs, exist_ok=exist_ok)

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> AbstractBufferedFile:
        return _FaultyFile(self, path, mode, block_size or "default", **kwargs)

    def _write(self, path: str, data: bytes, mode: str) -> None:
        if not isinstance(self.fs, LocalFileSystem):
            self.fs.pipe_file(path, data, mode=mode)
            return
        with written_aside(path, data) as aside:
            if mode == "create":
                Path(path).hardlink_to(aside)
            else:
                aside.replace(path)

    def _do(
        self, name: str, path: str, operation: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        path = self._strip_protocol(path)
        how = self.plan.count(name, path)
        if how is How.KILL_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        if how is How.BEFORE:
            raise ConnectionResetError(f"injected before {name} of {path}")
        try:
            return operation(path, *args, **kwargs)
        finally:
            # what is there to be answered may be an error, such as that of a file that is not there
            if how is How.KILL_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
            if how is How.AFTER:
                raise ConnectionResetError(f"injected after {name} of {path}")


class _FaultyFile(AbstractBufferedFile):  # type: ignore[misc]
    """Reads in ranges, each an operation; writes all of it in one operation, when it is closed."""

    def _fetch_range(self, start: int, end: int) -> Any:
        return self.fs.cat_file(self.path, start=start, end=end)

    def _initiate_upload(self) -> None:
        """Begin nothing."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue())
        return False  # keep the buffer
