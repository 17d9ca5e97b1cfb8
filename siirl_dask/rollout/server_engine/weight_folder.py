"""Versions of all weights as files, which servers read."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from siirl_dask.devices import cpus
from siirl_dask.errors import ConfigError, clause

_PREFIX = "siirl-weights-"
_MOUNTS = Path("/proc/self/ns/mnt")
_NAME = re.compile(r"[0-9a-f]{32}")
"""Name of an engine; its folder's ends with it."""


class WeightFolder:
    """A folder of one engine, in the folder that workers and servers share. It has the version that
    is in use, and the next one while that is written; ``close`` removes it.

    Folders of engines that ended without closing theirs are removed: of this host where their locks
    are free, and of any host by ``remove_of``. A lock says nothing of another host's engine: file
    systems may have locks for one host alone. ConfigError where the folder cannot be written.
    """

    def __init__(self, shared: str, bucket: int, engine: str) -> None:
        """``bucket`` is the most bytes of weights that are in memory at once; a larger one is
        there alone. ``engine`` is the engine's name, 32 hexadecimal digits that no other has.
        """
        self._bucket = bucket
        self._written = 0
        self._shared = Path(shared)
        self._path = self._shared / f"{_PREFIX}{_locks_seen_by()}-{engine}"
        self._lock = _lock_of(self._path)
        try:
            self._shared.mkdir(parents=True, exist_ok=True)
            # before the folder is there: other engines remove folders without an owner
            self._lock.acquire(blocking=False)
            self._path.mkdir()
            _remove_abandoned(self._shared)
        except OSError as error:
            raise ConfigError(
                f"rollout.server.weights_folder={shared!r}: {clause(error)}; expected a folder that this "
                "worker may write and the servers may read"
            ) from error

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Write all weights of a version, by the names of a model's folder; returns their folder,
        whose name no other weights had: hosts remember what a folder had in it.
        """
        self._written += 1
        folder = self._path / f"version={version}-{self._written}"
        folder.mkdir()
        held: dict[str, Tensor] = {}
        size = 0
        number = 0
        for name, tensor in weights:
            if held and size + tensor.nbytes > self._bucket:
                save_file(held, folder / f"model-{number:05}.safetensors")
                number += 1
                held = {}
                size = 0
            # the sender's memory is its own; and files take no tensors that share some
            held[name] = tensor.detach().to("cpu", copy=True).contiguous()
            size += tensor.nbytes
        save_file(held, folder / f"model-{number:05}.safetensors")
        return folder

    def keep_only(self, folder: Path) -> None:
        """Remove all versions but the one in ``folder``. What a server still reads, which was out of
        reach, may stay on some file systems until the next time.
        """
        for other in self._path.glob("version=*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    def remove_of(self, engine: str) -> None:
        """Remove the folder of another engine, whose servers are this one's now. Any text is
        taken: one that is no engine's name has no folder.
        """
        if _NAME.fullmatch(engine) is None:
            return
        for folder in self._shared.glob(f"{_PREFIX}*-{engine}"):
            shutil.rmtree(folder, ignore_errors=True)
            Path(_lock_of(folder).lock_file).unlink(missing_ok=True)

    def close(self) -> None:
        _remove(self._path, self._lock)


@cache
def _locks_seen_by() -> str:
    """Return a name of the processes whose locks on files this one sees on any file system: those
    of its kernel that have its mounts.
    """
    mounts = Path()
    if _MOUNTS.is_symlink():
        mounts = _MOUNTS.readlink()
    return sha256(f"{cpus.kernel()} {mounts}".encode()).hexdigest()[:16]


def _lock_of(folder: Path) -> FileLock:
    """Return the lock that the owner of a folder holds, which is a file beside it."""
    return FileLock(folder.with_name(f".{folder.name}.lock"))


def _remove(folder: Path, lock: FileLock) -> None:
    """Remove a folder and its lock, which this process holds."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _remove_abandoned(shared: Path) -> None:
    """Remove the folders of this host's engines that are gone."""
    for folder in shared.glob(f"{_PREFIX}{_locks_seen_by()}-*"):
        lock = _lock_of(folder)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        _remove(folder, lock)
