"""The operations that every store must have: open a URL, list, read, write atomically, create
exclusively.

On local files both writes go to a temporary file in the same folder first. On an object store one
PUT is atomic, and an exclusive one is a conditional PUT. Filesystems with neither (sftp, ftp, hdfs
through fsspec) give no such promise.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from glob import has_magic
from http import HTTPStatus
from inspect import signature
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from fsspec.utils import get_protocol

from siirl_storage.errors import Conflict, StorageError
from siirl_storage.retry import is_transient, retry
from siirl_storage.retrying import RetryingFileSystem

_REMOVALS = 5  # S3's bulk deletion, as s3fs calls it, says nothing of keys that it could not delete
_OPEN_FILES = re.compile(r"/proc/\d+(/task/\d+)?/fd(/|$)", re.ASCII)
_REMOVERS = 16  # threads: each deletion is one request
_memory_lock = threading.Lock()  # memory:// looks, then creates: two threads could both succeed


def open_fs(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the filesystem of ``url`` and the path on it. StorageError if the protocol or its
    package is unknown.

    Operations on a filesystem that is neither local nor ``memory://`` are repeated while they fail
    with errors that
    pass: see ``siirl_storage.retry``.
    """
    try:
        fs, path = url_to_fs(url)
        # s3fs, gcsfs, adlfs: a listing they remember hides what other processes wrote since
        if fs.async_impl:
            fs, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise StorageError(
            f"cannot open {url!r}: {error}"
        ) from error  # says "Install s3fs to access S3"
    except ValueError as error:
        near = get_close_matches(get_protocol(url), known_implementations, n=1)
        hint = ""
        if near:
            hint = f"; did you mean {near[0]}://?"
        raise StorageError(f"cannot open {url!r}: {error}{hint}") from error
    _check_name(fs, url)
    if isinstance(fs, (LocalFileSystem, MemoryFileSystem)):
        return fs, str(path)
    if "s3" in fs.protocol:
        # its own loop around botocore's: five times five tries of a silent endpoint took 414 s
        fs.retries = 1
    return RetryingFileSystem(fs), str(path)


def _check_name(fs: AbstractFileSystem, url: str) -> None:
    """Raise StorageError for a name that no file has, and for one in which fsspec reads more than a
    name, and opens what another name has.
    """
    if "\0" in url:
        raise StorageError(f"cannot open {url!r}: no name has the character of number 0")
    head, chain, rest = url.partition("::")
    if chain and not _is_linked(type(fs)):
        raise StorageError(
            f"cannot open {url!r}: fsspec takes '::' for a chain, and opens {head!r} without "
            f"{rest!r}"
        )
    if "s3" in fs.protocol and "?versionId=" in url:
        raise StorageError(
            f"cannot open {url!r}: s3fs takes '?versionId=' and what follows for no part of the "
            "name"
        )


def _is_linked(kind: type) -> bool:
    """Return whether filesystems of this kind open what comes after them in a chain, as caches
    and archives do.
    """
    makers = [
        signature(vars(base)["__init__"]) for base in kind.__mro__ if "__init__" in vars(base)
    ]
    return any(name in maker.parameters for maker in makers for name in ("fo", "target_protocol"))


def absolute(url: str) -> str:
    """Return ``url`` so that it names the same place in any process: a local path is made
    absolute.
    """
    fs, path = open_fs(url)
    if isinstance(fs, LocalFileSystem):
        return path
    return url


def full_name(fs: AbstractFileSystem, path: str) -> str:
    """Return ``path`` for error messages: absolute, with its protocol unless it is local."""
    if isinstance(fs, LocalFileSystem):
        return path
    return str(fs.unstrip_protocol(path))


def join(url: str, *names: str) -> str:
    """Return ``url/name/name``, for a URL, a URL that is only a protocol (``memory://``), or a
    path.
    """
    head, scheme, rest = url.rpartition("://")
    stem = rest.rstrip("/")
    start = ""
    if stem or rest:
        start = f"{stem}/"
    end = "/".join(name.strip("/") for name in names)
    return f"{head}{scheme}{start}{end}"


def parent(url: str) -> str:
    """Return the folder that holds ``url``."""
    head, scheme, rest = url.rpartition("://")
    folder, slash, _ = rest.rstrip("/").rpartition("/")
    return head + scheme + (folder or slash)


def at(root: str, relative: str) -> str:
    """Return the path of ``relative`` below ``root``, both on one filesystem."""
    return f"{root.rstrip('/')}/{relative}"


def list_files(fs: AbstractFileSystem, root: str) -> dict[str, int]:
    """Return the sizes of all files below ``root`` by relative path. ``{"": bytes}`` if ``root``
    is itself a file.
    """
    start = len(root.rstrip("/")) + 1
    try:
        files = fs.find(root, detail=True)
    except FileNotFoundError:  # a bucket that does not exist
        return {}
    return {str(name)[start:]: _size(fs, name, info) for name, info in files.items()}


def check_reached(fs: AbstractFileSystem, path: str) -> None:
    """Raise StorageError where nothing was found at ``path`` because its server gave no answer, or
    refused one: fsspec's HTTP filesystem takes each error of a request for a file that is not there.
    """
    if "http" not in fs.protocol:
        return
    try:
        fs.info(path)
    except FileNotFoundError as error:
        cause = error.__cause__
        is_absent = getattr(cause, "status", None) == HTTPStatus.NOT_FOUND
        if cause is None or is_absent or isinstance(cause, FileNotFoundError):
            return
        raise StorageError(
            f"{full_name(fs, path)} cannot be reached: {type(cause).__name__}: {cause}"
        ) from error


def _size(fs: AbstractFileSystem, name: str, info: Mapping[str, Any]) -> int:
    """Return a file's bytes; huggingface_hub 1 does not list them where ``name`` is the very
    file that is asked for.
    """
    known = info if "size" in info else fs.info(name)
    return int(known["size"] or 0)


def open_input(fs: AbstractFileSystem, path: str, read_ahead: int | None = None) -> pa.NativeFile:
    """Open ``path`` for random reads. FileNotFoundError if it is missing.

    ``read_ahead`` is how many bytes after each read an object store's client may fetch with it;
    None: as it likes.
    """
    if isinstance(fs, LocalFileSystem):
        return pa.OSFile(path, mode="rb")
    if isinstance(fs, MemoryFileSystem):
        # its open() gives every reader the same object, position included
        return pa.BufferReader(fs.cat_file(path))
    return pa.PythonFile(fs.open(path, "rb", block_size=read_ahead), mode="r")


def write_atomic(fs: AbstractFileSystem, path: str, data: bytes | memoryview) -> None:
    """Write or replace ``path``; a reader sees the whole old file or the whole new one at any
    moment.

    Folders are made as needed. On local files the bytes are on disk when this returns. A device, a
    pipe or an open file, such as ``/dev/null`` and ``/dev/stdout``, gets the bytes and stays.
    """
    if isinstance(fs, LocalFileSystem) and _is_stream(path):
        with Path(path).open("wb") as stream:
            stream.write(data)
    elif isinstance(fs, LocalFileSystem):
        with written_aside(path, data) as aside:
            # fsspec's own commit goes through /tmp and shutil.move, which may copy
            aside.replace(path)
    else:
        fs.pipe_file(path, bytes(data))  # bytes: botocore refuses a memoryview


def _is_stream(path: str) -> bool:
    """Return whether a local path is what a renamed file would take the place of for every process:
    a device, a pipe, or the name that the system gives an open file. Links of users are none.
    """
    try:
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode):
            return any(is_kind(mode) for is_kind in (stat.S_ISCHR, stat.S_ISBLK, stat.S_ISFIFO))
        names = (str(Path(path).readlink()), os.path.realpath(Path(path).parent))
    except OSError:  # it is not there yet
        return False
    return any(name.startswith("/proc/self/fd") or _OPEN_FILES.match(name) for name in names)


def write_exclusive(fs: AbstractFileSystem, path: str, data: bytes | memoryview) -> None:
    """Create ``path`` with ``data``, or raise Conflict if it exists; exactly one of several writers
    succeeds.

    ``data`` must differ between writers, as with a random token in it: where a reply was lost, the
    winner is refused as well, and knows by the content that the file is its own. Writing the same
    data again changes nothing.
    """
    try:
        if isinstance(fs, LocalFileSystem):
            with written_aside(path, data) as aside:
                _link(aside, Path(path))
        elif isinstance(fs, MemoryFileSystem):
            with _memory_lock:
                _create(fs, path, bytes(data))
        else:
            retry(_create, fs, path, bytes(data))
    except FileExistsError as error:
        if not _holds(fs, path, data):
            raise Conflict(f"{full_name(fs, path)} already exists") from error


def remove_file(fs: AbstractFileSystem, path: str) -> None:
    """Delete the file at ``path``, if it is there."""
    with suppress(FileNotFoundError):
        fs.rm_file(path)


def remove_tree(fs: AbstractFileSystem, path: str) -> None:
    """Delete everything at and below ``path``, if there is anything. OSError if some of it stays.

    Others may delete there meanwhile.
    """
    for _ in range(_REMOVALS):
        with suppress(FileNotFoundError):  # of what another one deleted since it was listed
            if has_magic(path) and not isinstance(fs, LocalFileSystem):
                _remove_listed(fs, path)
            else:
                fs.rm(path, recursive=True)
        if not fs.exists(path):
            return
    raise OSError(
        errno.ENOTEMPTY,
        f"{_REMOVALS} times deleted, and something is still there",
        full_name(fs, path),
    )


def _remove_listed(fs: AbstractFileSystem, path: str) -> None:
    """Delete what is listed below ``path``, each by its name: fsspec's ``rm`` takes a name with
    ``[``, ``*`` or ``?`` for a pattern, alone and in a list, and deletes what matches it.
    """
    found = fs.find(path, withdirs=True, detail=True)
    folders = {name for name, info in found.items() if info["type"] == "directory"}
    with ThreadPoolExecutor(_REMOVERS) as pool:
        list(pool.map(partial(remove_file, fs), found.keys() - folders))
    if not fs.exists(path):  # an object store has no folders
        return
    for folder in sorted({*folders, path}, key=len, reverse=True):
        try:
            fs.rmdir(folder)
        except (FileNotFoundError, FileExistsError):
            # the second one: s3fs, where others have written meanwhile
            continue
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def _create(fs: AbstractFileSystem, path: str, data: bytes) -> None:
    """Create ``path``, or raise FileExistsError once it can be seen."""
    try:
        fs.pipe_file(path, data, mode="create")
    except OSError as error:
        # Not every S3-compatible store words a refused precondition in the way that s3fs takes for
        # FileExistsError.
        if is_transient(error) or (not isinstance(error, FileExistsError) and not fs.exists(path)):
            raise
        if not fs.exists(path):
            raise TimeoutError(
                f"{full_name(fs, path)} already exists, but cannot be seen yet"
            ) from error
        raise FileExistsError(f"{full_name(fs, path)} already exists ({error})") from error


def _holds(fs: AbstractFileSystem, path: str, data: bytes | memoryview) -> bool:
    try:
        return bool(fs.cat_file(path) == data)
    except FileNotFoundError:  # deleted since
        return False


def _link(aside: Path, path: Path) -> None:
    """Give ``aside`` the name ``path``, or raise FileExistsError."""
    try:
        path.hardlink_to(aside)
    except FileExistsError:
        if aside.stat().st_nlink == 1:  # NFS may lose the reply to a link that it made
            raise


@contextmanager
def full_disk_named(path: str | os.PathLike[str], nbytes: int | None = None) -> Iterator[None]:
    """Raise OSError that says how much is free, and how much ``nbytes`` is more, where a disk or a
    quota is full.

    ``path`` is the local file that is written. Other errors pass as they are.
    """
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise OSError(error.errno, _full(Path(path), error, nbytes), str(path)) from error


def is_full(error: BaseException | None) -> bool:
    """Return whether an error is that of a full disk, or of a quota that is used up."""
    if not isinstance(error, OSError):
        return False
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _full(path: Path, error: OSError, nbytes: int | None) -> str:
    folder = next(place for place in path.absolute().parents if place.exists())
    disk = shutil.disk_usage(folder)
    what = "the disk is full"
    if error.errno == errno.EDQUOT:
        what = "the quota is used up"
    free = f"{disk.free:,} of its {disk.total:,} bytes are free"
    if nbytes is None:
        return f"{what}: {free}; make room and start again"
    missing = max(0, nbytes - disk.free)
    more = ""
    if missing:
        more = f", at least {missing:,} more than there are"
    return (
        f"{what}: {free}, and {nbytes:,} were to be written next{more}; make room and start again"
    )


@contextmanager
def written_aside(path: str, data: bytes | memoryview) -> Iterator[Path]:
    """Yield a synced temporary file beside ``path`` with ``data``; remove it at the end, unless
    it was renamed.
    """
    folder = Path(path).parent
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{Path(path).name}.{uuid4().hex}.tmp"
    try:
        size = memoryview(data).nbytes
        # not mkstemp, whose mode 0600 would hide the data from other users
        with full_disk_named(path, size), aside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield aside
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # the new name, too, must survive a power cut
        finally:
            os.close(descriptor)
    finally:
        aside.unlink(missing_ok=True)
