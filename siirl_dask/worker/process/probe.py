"""Checks, on a worker's host, the files and folders that a run will use, and fetches its models."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from uuid import uuid4

from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs, write_atomic

from siirl_dask.errors import ConfigError
from siirl_dask.models.cache import fetch, forget, is_here
from siirl_dask.models.remote import RemoteModel


async def find_unreachable(
    reads: Mapping[str, str], run_url: str, probe_file: str
) -> tuple[str, list[str]]:
    """Return this host's name, and a sentence for each URL that a worker here cannot read or write.

    ``reads`` has the URLs that it must be able to read, by how a message names them. ``probe_file``
    is the name of a file that the driver has written in the folder ``run_url``.
    """
    return socket.gethostname(), await asyncio.to_thread(_problems, reads, run_url, probe_file)


async def bring_models(models: Sequence[RemoteModel]) -> tuple[str, int, str]:
    """Fetch models to this host; return its name, the bytes fetched, and why one failed, or an
    empty text.
    """
    fetched: list[int] = []

    def fetch_all() -> str:
        try:
            for model in models:
                if not is_here(model):
                    fetch(model, fetched.append)
        except ConfigError as error:
            return str(error)
        return ""

    problem = await asyncio.to_thread(fetch_all)
    return socket.gethostname(), sum(fetched), problem


async def forget_models(models: Sequence[RemoteModel]) -> tuple[str, str]:
    """Delete the copies of models that ``bring_models`` fetched to this host; return its name,
    and why one stays.
    """

    def delete() -> str:
        try:
            for model in models:
                forget(model)
        except OSError as error:
            return str(error)
        return ""

    return socket.gethostname(), await asyncio.to_thread(delete)


def _problems(reads: Mapping[str, str], run_url: str, probe_file: str) -> list[str]:
    problems = []
    for name, url in reads.items():
        if reason := _why_unreadable(url):
            problems.append(f"{name} {url!r} {reason}")
    if reason := _why_unwritable(run_url, probe_file):
        problems.append(f"run.url {run_url!r} {reason}")
    return problems


def _why_unreadable(url: str) -> str | None:
    try:
        fs, path = open_fs(url)
        if not fs.exists(path):
            return "is not there"
        if isinstance(fs, LocalFileSystem) and not _may_read(Path(path)):
            return f"may not be read by user {os.getuid()}"
    except Exception as error:
        # each store has errors of its own: no package, no credentials, no connection
        return f"cannot be opened: {type(error).__name__}: {error}"
    return None


def _may_read(path: Path) -> bool:
    mode = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
    return os.access(path, mode)


def _why_unwritable(url: str, probe_file: str) -> str | None:
    """Return why the folder is not the one where the driver has written ``probe_file``, or
    cannot be written.
    """
    try:
        fs, path = open_fs(url)
        if not fs.exists(f"{path}/{probe_file}"):
            return "is another folder there: a file that the driver has just written is not in it"
        own_file = f"{path}/.writable-{uuid4().hex}"
        write_atomic(fs, own_file, b"")
        fs.rm_file(own_file)
    except Exception as error:  # each store has errors of its own
        return f"cannot be written: {type(error).__name__}: {error}"
    return None
