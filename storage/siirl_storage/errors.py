"""The exceptions that this package raises on purpose. Errors of the network or the disk
(OSError) pass through.
"""

from __future__ import annotations


def clause(error: object) -> str:
    """Return the words of an error for the middle of a sentence, without a full stop behind them;
    an ellipsis stays.
    """
    text = str(error).rstrip()
    return text if text.endswith("..") else text.removesuffix(".")


class StorageError(Exception):
    """A stored file, or a request to the store, cannot be used."""


class TableNotFound(StorageError):
    """There is no table at a URL, or no such version of it."""


class Conflict(StorageError):
    """Another writer was first to create a file that must be new, or a manifest's version."""


class CorruptPart(StorageError):
    """A part is missing, damaged, or differs from its manifest; no row of it was returned."""

    def __init__(self, path: str, reason: str) -> None:
        # both in args, so that the exception survives a trip between processes
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"{self.path} cannot be read: {clause(self.reason)}. Restore it from a copy, or delete "
            "it and write it again"
        )


class PartsDiffer(StorageError):
    """The files of a folder have columns of different names or types: they are no one table."""


class TooLarge(StorageError):
    """A row group, or the rows that were asked for, take more memory once decoded than the
    reader allows.
    """

    def __init__(self, where: str, nbytes: int, bound: int) -> None:
        # all in args, so that the exception survives a trip between processes
        super().__init__(where, nbytes, bound)
        self.where = where
        self.nbytes = nbytes
        self.bound = bound

    def __str__(self) -> str:
        return (
            f"{self.where} takes at least {self.nbytes} bytes once decoded, and at most "
            f"{self.bound} may be read at "
            "once. Write it with smaller row groups, or raise the bound"
        )
