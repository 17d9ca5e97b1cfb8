"""Brings the files of a model at a URL to this host, once: the processes of a host share a folder
of them.

A folder is there when all its files are, under a name that has the digest of their names, sizes and
tags (ETags where the store has them). So one that is there is never looked at again, and a model
that changes gets another. Models of the hub go to the hub's own cache, which other tools on the
host use as well.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath

from filelock import FileLock
from fsspec import AbstractFileSystem
from siirl_storage import full_disk_named, join, open_fs, remove_tree

from siirl_dask.config import ModelConfig
from siirl_dask.context import Device
from siirl_dask.errors import ConfigError, clause
from siirl_dask.models.remote import (
    HUB,
    RemoteFile,
    RemoteModel,
    find_model,
    hub_name,
    is_remote,
    reached,
)

FOLDER = "SIIRL_DASK_CACHE"
"""Environment variable with the folder of the cache; by default ``siirl_dask`` in the user's own
cache."""
ADAPTER_CONFIG = "adapter_config.json"
"""File of a folder with adapters in peft's format."""
# ranges of a file read at once: one stream of an object store is slower than a network link
_STREAMS = 8
_RANGE = 2**24  # bytes of each
Progress = Callable[[int], None]
"""Called with the number of bytes that came."""


def cache_folder() -> Path:
    """Return the folder of this host's models."""
    given = os.environ.get(FOLDER)
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "siirl_dask"
    return (Path(given) if given else own) / "models"


def local_folder(path: str, known: Mapping[str, RemoteModel]) -> str:
    """Return the folder of the model at ``path`` on this host: ``path`` itself, or that of a URL,
    fetched by now.

    ``known`` are models by URL, as they were when a run began; one that is not among them is looked
    for now.
    """
    if not is_remote(path):
        return path
    model = known[path] if path in known else find_model(path)
    return str(fetch(model))


def folder_here(path: str, *, weights: bool) -> str:
    """Return the folder of the model at ``path`` on this host, fetched by now: with its weights,
    or without.
    """
    if not is_remote(path):
        return path
    model = find_model(path)
    if not weights and not is_here(model):
        model = model.without_weights()
    return str(fetch(model))


def open_model(path: str) -> tuple[AbstractFileSystem, str]:
    """Return where a model's files can be read: in its folder on this host, where a URL's files
    have come.
    """
    folder = folder_if_here(path)
    if folder is None:
        return open_fs(path)
    return open_fs(folder)


def folder_if_here(path: str) -> str | None:
    """Return the folder of the model at ``path`` on this host; None for a URL whose files have not
    all come.
    """
    if not is_remote(path):
        return path
    model = find_model(path)
    if is_here(model):
        return str(fetch(model))
    return None


def check_no_adapters(path: str) -> None:
    """Raise ConfigError for the folder of a model, on any fsspec URL, that has adapters beside its
    weights: some loaders add them, and others do not look at them.
    """
    with reached(path):
        fs, folder = open_model(path)
        has_adapters = fs.exists(f"{folder}/{ADAPTER_CONFIG}")
    if has_adapters:
        raise ConfigError(
            f"model.path={path!r}: it has {ADAPTER_CONFIG} beside the model: transformers would add those "
            "adapters to the weights, and engines and trainer.backend=fsdp would not; move them to "
            "a folder of their own, with which trainer.lora.path begins, or merge them into the "
            "weights"
        )


def local_model(model: ModelConfig, device: Device) -> ModelConfig:
    """Return ``model`` with its folder on this host as its path; see ``local_folder``."""
    return replace(model, path=local_folder(model.path, device.models))


def fetch(model: RemoteModel, progress: Progress = lambda nbytes: None) -> Path:
    """Return the folder with all files of ``model``, which come now unless an earlier call brought
    them.

    Of several processes on a host one fetches, and the others wait for it. ConfigError for files
    that cannot be read, or that have changed since they were listed; for a disk without room for
    them; for a cache that cannot be written.
    """
    if model.url.startswith(HUB):
        return _fetch_from_hub(model, progress)
    folder = folder_of(model)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock_of(folder)):
            if not folder.is_dir():
                _fill(model, folder, progress)
    except OSError as error:  # of this host's disk: those of the store are told by ``reached``
        raise ConfigError(
            f"model {model.url!r}: it cannot be stored in {folder.parent}: {clause(error)}; {FOLDER} names "
            "another folder"
        ) from error
    return folder


def is_here(model: RemoteModel) -> bool:
    """Return whether this host has all files, so that ``fetch`` would bring none."""
    if not model.url.startswith(HUB):
        return folder_of(model).is_dir()
    from huggingface_hub import try_to_load_from_cache

    name = hub_name(model.url)
    files = [str(PurePosixPath(name.folder, file.name)) for file in model.files]
    return all(
        isinstance(try_to_load_from_cache(name.repo, file, revision=model.commit), str)
        for file in files
    )


def forget(model: RemoteModel) -> None:
    """Delete what ``fetch`` has brought of a model that is not of the hub, all or a part of it.
    OSError if some stays.

    Others may forget it at the same time; nobody may fetch it.
    """
    folder = folder_of(model)
    for tree in (folder, _part_of(folder)):
        remove_tree(*open_fs(str(tree)))
    _lock_of(folder).unlink(missing_ok=True)


def folder_of(model: RemoteModel) -> Path:
    """Return where ``fetch`` puts the files of a model that is not of the hub."""
    readable = re.sub(r"[^\w.-]+", "-", model.url)[-60:].strip("-.")
    return cache_folder() / f"{readable}-{model.key}"


def _part_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _fill(model: RemoteModel, folder: Path, progress: Progress) -> None:
    """Bring all files into ``folder``, which is not there before they are whole. Files that came
    before stay.
    """
    part = _part_of(folder)
    part.mkdir(exist_ok=True)
    missing = [file for file in model.files if not (part / file.name).is_file()]
    needed = sum(file.nbytes for file in missing)
    free = shutil.disk_usage(part).free
    if needed > free:
        raise OSError(f"its files have {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")
    progress(model.nbytes - needed)
    pool = ThreadPoolExecutor(_STREAMS, "siirl-model")
    try:
        for file in missing:
            _bring(pool, model.url, file, part / file.name, progress)
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C does not wait for the rest of a file
    if missing and not set(model.files) <= set(find_model(model.url).files):
        shutil.rmtree(part)
        raise ConfigError(
            f"model {model.url!r}: its files have changed while they were fetched: try again"
        )
    part.rename(folder)


def _bring(
    pool: ThreadPoolExecutor,
    url: str,
    file: RemoteFile,
    to: Path,
    progress: Progress,
) -> None:
    """Bring one file, in ranges; it is there when it is whole, and on the disk."""
    to.parent.mkdir(exist_ok=True)  # the folder of chat templates
    aside = to.with_name(f"{to.name}.part")
    with full_disk_named(aside, file.nbytes), aside.open("wb") as target:
        target.truncate(file.nbytes)
        starts = range(0, file.nbytes, _RANGE)
        for nbytes in pool.map(partial(_bring_range, url, file, target.fileno()), starts):
            progress(nbytes)
        os.fsync(target.fileno())
    aside.replace(to)


def _bring_range(url: str, file: RemoteFile, target: int, start: int) -> int:
    end = min(start + _RANGE, file.nbytes)
    with reached(url, file.name):
        fs, path = open_fs(join(url, file.name))
        data = fs.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"it gave {len(data)} of the {end - start} bytes from {start} on")
    os.pwrite(target, data, start)
    return end - start


def _fetch_from_hub(model: RemoteModel, progress: Progress) -> Path:
    from huggingface_hub import constants, snapshot_download

    name = hub_name(model.url)
    with reached(model.url):
        wanted = [str(PurePosixPath(name.folder, file.name)) for file in model.files]
        offline = bool(constants.HF_HUB_OFFLINE)
        root = snapshot_download(
            name.repo,
            revision=model.commit,
            allow_patterns=wanted,
            local_files_only=offline,
        )
        folder = Path(root) / name.folder
        lacking = [file.name for file in model.files if not _has(folder / file.name, file.nbytes)]
    if lacking:
        raise ConfigError(
            f"model {model.url!r}: {folder} has not all of {', '.join(lacking[:5])}"
            f"{', and HF_HUB_OFFLINE is set' if offline else ''}"
        )
    progress(model.nbytes)
    return folder


def _has(file: Path, nbytes: int) -> bool:
    if not file.is_file():
        return False
    return file.stat().st_size == nbytes
