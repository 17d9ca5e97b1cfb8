"""Verifies what a run resumes from: the workers read every file once, and compare its digest."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distributed import Client, Future, wait
from siirl_storage import FileDigest, absolute

from siirl_dask.config import Config
from siirl_dask.driver.clusters.processes import gone
from siirl_dask.driver.recovery.resume import ResumePoint, find_resume_point
from siirl_dask.errors import RunError, WorkerLost
from siirl_dask.planner import DAG
from siirl_dask.runs.checkpoints import Checkpoint, damage_of

logger = logging.getLogger("siirl_dask.driver")
_INTERVAL = 1.0  # seconds between two looks at the workers, while none has read a file


def verified_resume_point(
    config: Config,
    dag: DAG,
    client: Client,
    members: Mapping[str, str],
    *,
    fresh: bool,
    force: bool,
) -> ResumePoint:
    """Return where the run begins, like ``find_resume_point``: at the newest checkpoint of which
    every file is whole.

    Those that are skipped are named in the log. CheckpointError if there are checkpoints and none
    is whole.
    """
    damaged: dict[str, str] = {}
    while True:
        resume = find_resume_point(config, dag, fresh=fresh, force=force, damaged=damaged)
        damage = ""
        if resume.checkpoint is not None:
            damage = _damage(client, members, resume.checkpoint, config.cluster.stall_timeout)
        if resume.checkpoint is None or not damage:
            for text in resume.skipped:
                logger.warning("%s; it is passed over", text)
            return resume
        damaged[resume.checkpoint.url] = damage


def _damage(
    client: Client,
    members: Mapping[str, str],
    checkpoint: Checkpoint,
    timeout: float,
) -> str:
    """Return what is wrong with the checkpoint; empty if nothing is."""
    files = [
        WrittenFile(absolute(checkpoint.url), name, digest)
        for name, digest in checkpoint.files().items()
    ]
    return next(filter(None, damages_of(client, members, files, timeout)), "")


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file, and the digest of it as it was written."""

    folder: str
    name: str
    digest: FileDigest


def damages_of(
    client: Client,
    members: Mapping[str, str],
    files: Sequence[WrittenFile],
    timeout: float,
) -> list[str]:
    """Return what is wrong with each of the files, empty for one that is as it was written.

    They are shared out among the workers. RunError when nothing comes for ``timeout`` seconds, or a
    file cannot be read; WorkerLost when a worker leaves meanwhile.
    """
    assigned_bytes = dict.fromkeys(members.values(), 0)
    futures: dict[WrittenFile, Future[str]] = {}
    for file in sorted(files, key=lambda file: -file.digest.nbytes):
        # the largest file for the worker with least
        address = min(assigned_bytes, key=assigned_bytes.__getitem__)
        assigned_bytes[address] += file.digest.nbytes
        digests = {file.name: file.digest}
        futures[file] = client.submit(
            damage_of, file.folder, digests, workers=[address], pure=False
        )
    try:
        _wait(client, members, futures.values(), timeout)
        return [_result(file, futures[file]) for file in files]
    finally:
        client.cancel(list(futures.values()))


def _wait(
    client: Client,
    members: Mapping[str, str],
    futures: Iterable[Future[str]],
    timeout: float,
) -> None:
    """Wait for all. RunError when none is done for ``timeout`` seconds.

    WorkerLost when a worker has left: Dask keeps what is to run on that one alone waiting.
    """
    pending = set(futures)
    since = time.monotonic()
    while pending:
        try:
            with client.as_current():  # another one may be the default of this process, or none
                pending = wait(
                    pending, timeout=min(timeout, _INTERVAL), return_when="FIRST_COMPLETED"
                ).not_done
            since = time.monotonic()
        except TimeoutError as error:
            lost = gone(client, members)
            if lost:
                raise WorkerLost(f"{lost} while files of the run were verified") from error
            if time.monotonic() - since >= timeout:
                raise RunError(
                    f"no worker could read a file of the run in {timeout:g} s "
                    "(cluster.stall_timeout)"
                ) from error


def _result(file: WrittenFile, future: Future[str]) -> str:
    try:
        return future.result()
    except OSError as error:
        raise RunError(
            f"{file.folder} cannot be read by a worker: {type(error).__name__}: {error}"
        ) from error
