"""SHA-256 of files: taken while they are written, and compared before they are read."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import IO, Any

from fsspec import AbstractFileSystem

_CHUNK = 16 << 20  # bytes held in memory while a file is read


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size and the SHA-256 of a file."""

    nbytes: int
    sha256: str

    @staticmethod
    def of(data: bytes | memoryview) -> FileDigest:
        """Return the digest of a file with the content ``data``."""
        return FileDigest(memoryview(data).nbytes, sha256(data).hexdigest())


class DigestingStream:
    """Passes on what is written to ``stream`` in order, and takes its digest: nothing is read
    for it.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = sha256()
        self._nbytes = 0

    def write(self, data: Any) -> int:
        """Write bytes, or any buffer of them."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self._nbytes += view.nbytes
        return self._stream.write(view)

    @property
    def digest(self) -> FileDigest:
        """The digest of what has been written so far."""
        return FileDigest(self._nbytes, self._hash.hexdigest())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def digest_file(fs: AbstractFileSystem, path: str) -> FileDigest:
    """Read ``path`` once and return its digest. FileNotFoundError if it is missing."""
    hashed = sha256()
    nbytes = 0
    with fs.open(path, "rb", block_size=_CHUNK, cache_type="readahead") as file:
        while chunk := file.read(_CHUNK):
            hashed.update(chunk)
            nbytes += len(chunk)
    return FileDigest(nbytes, hashed.hexdigest())
