"""A filesystem around another one whose operations are repeated while they fail with errors that
pass.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from fsspec import AbstractFileSystem

from siirl_storage.retry import retry


class RetryingFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Gives access to the files of ``fs``; see ``siirl_storage.retry`` for what is repeated, and
    for how long.

    The clients below repeat single requests a few times themselves; this holds whatever they give
    up on. A stream that is opened for writing is not repeated, since its bytes are gone: who writes
    one repeats all of it.
    """

    cachable = False

    def __init__(self, fs: AbstractFileSystem) -> None:
        super().__init__()
        self.fs = fs
        self.protocol = fs.protocol
        self._strip_protocol = fs._strip_protocol
        self._parent = fs._parent
        self.unstrip_protocol = fs.unstrip_protocol

    def info(self, path: str, **kwargs: Any) -> Any:
        return retry(self.fs.info, path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return retry(self.fs.ls, path, detail=detail, **kwargs)

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return retry(self.fs.find, path, *args, **kwargs)

    def glob(self, path: str, *args: Any, **kwargs: Any) -> Any:
        return retry(self.fs.glob, path, *args, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Tell whether there is something at ``path``. An error is raised, where fsspec's own
        would say no.
        """
        return self._is(path, lambda info: True, **kwargs)

    def isfile(self, path: str) -> bool:
        return self._is(path, lambda info: info["type"] == "file")

    def isdir(self, path: str) -> bool:
        return self._is(path, lambda info: info["type"] == "directory")

    def modified(self, path: str) -> Any:
        return retry(self.fs.modified, path)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> Any:
        return retry(self.fs.cat_file, path, start=start, end=end, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> Any:
        """Write a file. In mode ``create`` a repeated write may meet its own first try, and
        raise FileExistsError.
        """
        return retry(self.fs.pipe_file, path, value, mode=mode, **kwargs)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        retry(self.fs.cp_file, path1, path2, **kwargs)

    def get(self, rpath: Any, lpath: Any, *args: Any, **kwargs: Any) -> None:
        retry(self.fs.get, rpath, lpath, *args, **kwargs)

    def put(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        retry(self.fs.put, lpath, rpath, *args, **kwargs)

    def get_file(self, rpath: str, lpath: str, **kwargs: Any) -> None:
        retry(self.fs.get_file, rpath, lpath, **kwargs)

    def put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        retry(self.fs.put_file, lpath, rpath, **kwargs)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        retry(self.fs.mkdir, path, create_parents=create_parents, **kwargs)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        retry(self.fs.makedirs, path, exist_ok=exist_ok)

    def rm_file(self, path: str) -> None:
        _removed(self.fs.rm_file, path)

    def rmdir(self, path: str) -> None:
        _removed(self.fs.rmdir, path)

    def rm(
        self,
        path: str | list[str],
        recursive: bool = False,
        maxdepth: int | None = None,
    ) -> None:
        _removed(self.fs.rm, path, recursive=recursive, maxdepth=maxdepth)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.fs.invalidate_cache(path)

    def _open(self, path: str, mode: str = "rb", *args: Any, **kwargs: Any) -> Any:
        file = retry(self.fs.open, path, mode, *args, **kwargs)
        if mode == "rb":
            return _RetryingReader(file)
        return file

    def _is(self, path: str, holds: Callable[[dict[str, Any]], bool], **kwargs: Any) -> bool:
        try:
            return holds(self.info(path, **kwargs))
        except (FileNotFoundError, NotADirectoryError):
            return False


class _RetryingReader(io.RawIOBase):
    """Repeats reads of ``file``, each at its own position. A filesystem's file fills its buffer
    anew after an error.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset = self._position + offset
            whence = io.SEEK_SET
        self._position = int(self._file.seek(offset, whence))
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        data: bytes = retry(self._read_at, self._position, -1 if size is None else size)
        self._position += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def _read_at(self, position: int, size: int) -> Any:
        self._file.seek(position)
        return self._file.read(size)


def _removed(remove: Callable[..., None], path: str | list[str], **kwargs: Any) -> None:
    """Call ``remove``; after a failure what it should remove may be gone."""
    tries = 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        try:
            remove(path, **kwargs)
        except FileNotFoundError:
            if tries == 1:
                raise

    retry(attempt)
