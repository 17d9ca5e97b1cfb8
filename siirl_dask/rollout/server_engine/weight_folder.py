"""Versions of all weights as files, which servers read."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout
from safetensors.torch import save_file
from torch import Tensor

from siirl_dask.errors import ConfigError, clause

_PREFIX = "siirl-weights-"


class WeightFolder:
    """A folder of one engine, in the folder that workers and servers share. It has the version that
    is in use, and the next one while that is written; ``close`` removes it.

    Folders of engines that ended without closing theirs are removed: their locks are free.
    ConfigError where the folder cannot be written.
    """

    def __init__(self, shared: str, bucket: int) -> None:
        """``bucket`` is the most bytes of weights that are in memory at once; a larger one is
        there alone.
        """
        self._bucket = bucket
        self._path = Path(shared) / f"{_PREFIX}{uuid4().hex}"
        self._lock = _lock_of(self._path)
        try:
            Path(shared).mkdir(parents=True, exist_ok=True)
            # before the folder is there: other engines remove folders without an owner
            self._lock.acquire(blocking=False)
            self._path.mkdir()
            _remove_abandoned(Path(shared))
        except OSError as error:
            raise ConfigError(
                f"rollout.server.weights_folder={shared!r}: {clause(error)}; expected a folder that this "
                "worker may write and the servers may read"
            ) from error

    def write(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Write all weights of a version, by the names of a model's folder; returns their folder."""
        folder = self._path / f"version={version}"
        shutil.rmtree(folder, ignore_errors=True)
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
        """Remove all versions but the one in ``folder``."""
        for other in self._path.glob("version=*"):
            if other != folder:
                shutil.rmtree(other)

    def close(self) -> None:
        _remove(self._path, self._lock)


def _lock_of(folder: Path) -> FileLock:
    """Return the lock that the owner of a folder holds, which is a file beside it."""
    return FileLock(folder.with_name(f".{folder.name}.lock"))


def _remove(folder: Path, lock: FileLock) -> None:
    """Remove a folder and its lock, which this process holds."""
    shutil.rmtree(folder, ignore_errors=True)
    lock.release()
    Path(lock.lock_file).unlink(missing_ok=True)


def _remove_abandoned(shared: Path) -> None:
    """Remove the folders of engines that are gone."""
    for folder in shared.glob(f"{_PREFIX}*"):
        lock = _lock_of(folder)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            continue
        _remove(folder, lock)
