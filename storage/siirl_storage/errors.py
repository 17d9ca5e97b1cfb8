"""Every exception this package raises on purpose. What the network or the disk raises (OSError) passes through."""

from __future__ import annotations


class StorageError(Exception):
    """Something stored, or asked of the store, cannot be used."""


class TableNotFound(StorageError):
    """There is no table, or no such version of it, where one was looked for."""


class Conflict(StorageError):
    """Somebody else created it first: a file that must be new, or a manifest's version."""


class CorruptPart(StorageError):
    """A part is missing, damaged, or not what its manifest says. Nothing of it was returned."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both in args, so that the exception survives a trip between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.reason}. Restore it from a copy, or delete it and write it again"
