"""Verifies what a run resumes from: the workers read every file once, and compare its digest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distributed import Client, Future, wait
from siirl_storage.digests import FileDigest
from siirl_storage.files import absolute

from siirl_dask.config import Config
from siirl_dask.driver.processes import gone
from siirl_dask.driver.resume import ResumePoint, find_resume_point
from siirl_dask.errors import RunError, WorkerLost
from siirl_dask.planner import DAG
from siirl_dask.runs.checkpoints import Checkpoint, damage_of

logger = logging.getLogger("siirl_dask.driver")
_GLANCE = 1.0  # seconds between two looks at the workers, while none has read a file


def verified_resume_point(
    config: Config, dag: DAG, client: Client, members: Mapping[str, str], *, fresh: bool, force: bool
) -> ResumePoint:
    """Return where the run begins, like ``find_resume_point``: at the newest checkpoint of which every file is whole.

    Those that are passed over are named in the log. CheckpointError if there are checkpoints and none is whole.
    """
    damaged: dict[str, str] = {}
    while True:
        resume = find_resume_point(config, dag, fresh=fresh, force=force, damaged=damaged)
        timeout = config.cluster.stall_timeout
        if resume.found is None or not (damage := _damage(client, members, resume.found, timeout)):
            for text in resume.passed_over:
                logger.warning("%s; it is passed over", text)
            return resume
        damaged[resume.found.url] = damage


def _damage(client: Client, members: Mapping[str, str], found: Checkpoint, timeout: float) -> str:
    """Return what is wrong with the checkpoint; empty if nothing is."""
    files = [File(absolute(found.url), name, written) for name, written in found.files().items()]
    return next(filter(None, damages(client, members, files, timeout)), "")


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was written."""

    folder: str
    name: str
    written: FileDigest


def damages(client: Client, members: Mapping[str, str], files: Sequence[File], timeout: float) -> list[str]:
    """Return what is wrong with each of the files, empty for one that is as it was written.

    They are shared out among the workers. RunError when nothing comes for ``timeout`` seconds, or a file cannot be
    read; WorkerLost when a worker leaves meanwhile.
    """
    load = dict.fromkeys(members.values(), 0)
    futures: dict[File, Future[str]] = {}
    for file in sorted(files, key=lambda file: -file.written.nbytes):
        address = min(load, key=load.__getitem__)  # the worker that has least to read gets the largest
        load[address] += file.written.nbytes
        named = {file.name: file.written}
        futures[file] = client.submit(damage_of, file.folder, named, workers=[address], pure=False)
    try:
        _wait(client, members, futures.values(), timeout)
        return [_result(file, futures[file]) for file in files]
    finally:
        client.cancel(list(futures.values()))


def _wait(client: Client, members: Mapping[str, str], futures: Iterable[Future[str]], timeout: float) -> None:
    """Wait for all. RunError when none is done for ``timeout`` seconds.

    WorkerLost when a worker has left: Dask keeps what is to run on that one alone waiting.
    """
    pending, since = set(futures), time.monotonic()
    while pending:
        try:
            pending = wait(pending, timeout=min(timeout, _GLANCE), return_when="FIRST_COMPLETED").not_done
            since = time.monotonic()
        except TimeoutError as error:
            if lost := gone(client, members):
                raise WorkerLost(f"{lost} while files of the run were verified") from error
            if time.monotonic() - since >= timeout:
                raise RunError(
                    f"no worker could read a file of the run in {timeout:g} s (cluster.stall_timeout)"
                ) from error


def _result(file: File, future: Future[str]) -> str:
    try:
        return future.result()
    except OSError as error:
        raise RunError(f"{file.folder} cannot be read by a worker: {type(error).__name__}: {error}") from error
