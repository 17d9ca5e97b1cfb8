"""Writes, creates, reads and deletes a small file where a run would, and leaves nothing there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import (
    Conflict,
    join,
    open_fs,
    remove_tree,
    retries_end_at,
    retry_seconds,
    set_retry_seconds,
    write_atomic,
    write_exclusive,
)

from siirl_dask.driver.doctor.finding import DoctorFinding, fault, ok
from siirl_dask.driver.doctor.logs import warnings_of
from siirl_dask.errors import ConfigError
from siirl_dask.runs.folder import check_writable

_PART = "storage"
_PATIENCE = 15.0  # seconds for the whole round trip
# seconds for which a failed operation is tried again: a run has storage.retry_seconds
_RETRIES = 2.0
_CURE = (
    "give run.url a folder that this user may write to, or look at the store's credentials and "
    "endpoint"
)


def check_storage(url: str) -> DoctorFinding:
    """Return the finding of a round trip in the folder ``url``, which need not be there and is
    not there afterwards.
    """
    try:
        check_writable(url, write=False)
    except ConfigError as error:
        return fault(_PART, str(error), _CURE)
    findings: list[DoctorFinding] = []
    before = retry_seconds()
    deadline = time.monotonic() + _PATIENCE

    def examine() -> None:
        with retries_end_at(deadline):
            findings.append(_round_trip(url))

    set_retry_seconds(min(before, _RETRIES))
    try:
        with warnings_of("siirl_storage") as warnings:
            trip = threading.Thread(target=examine, daemon=True)
            trip.start()
            trip.join(_PATIENCE)
    finally:
        set_retry_seconds(before)
    if findings:
        return findings[0]
    last = ""
    if warnings:
        last = f": {warnings[-1]}"
    return fault(_PART, f"{url} has not answered in {_PATIENCE:g} s{last}", _CURE)


def _round_trip(url: str) -> DoctorFinding:
    step = "be opened"
    began = time.monotonic()
    try:
        with _new_folder(url) as (fs, folder):
            data = uuid4().bytes
            step = "be written"
            write_atomic(fs, f"{folder}/file", data)
            step = "be read"
            if fs.cat_file(f"{folder}/file") != data:
                return fault(
                    _PART, f"{url} gives back other bytes than were written", "take another store"
                )
            step = "create a file once"
            write_exclusive(fs, f"{folder}/once", data)
            if _creates_twice(fs, f"{folder}/once"):
                text = (
                    f"{url} lets two writers create one file: two starts of a run would damage "
                    "each other's files"
                )
                return fault(
                    _PART, text, "take a POSIX file system, or an S3 store with conditional writes"
                )
            step = "be deleted from"
    except Exception as error:  # each store has errors of its own
        return fault(
            _PART, f"{url} cannot {step}: {type(error).__name__}: {error}".rstrip(": "), _CURE
        )
    seconds = time.monotonic() - began
    return ok(_PART, f"{url}: written, read, created once, deleted, in {seconds:.2f} s")


def _creates_twice(fs: AbstractFileSystem, path: str) -> bool:
    """Return whether a file that is there can be created once more."""
    try:
        write_exclusive(fs, path, uuid4().bytes)
    except Conflict:
        return False
    return True


@contextmanager
def _new_folder(url: str) -> Iterator[tuple[AbstractFileSystem, str]]:
    """Yield the place of a new folder in ``url``; remove it, and those above it that were not
    there before.
    """
    fs, folder = open_fs(join(url, f".doctor-{uuid4().hex}"))
    local = isinstance(fs, LocalFileSystem)
    new = []
    if local:
        new = [place for place in Path(folder).parents if not place.exists()]
    try:
        yield fs, folder
    finally:
        remove_tree(fs, folder)
        for place in new:
            with suppress(OSError):  # something else has been written there, or it was never made
                place.rmdir()
