"""Verifies a checkpoint before a run resumes from it: the workers read every file once, and compare its digest."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping

from distributed import Client, Future, wait
from siirl_storage.files import absolute

from siirl_dask.config import Config
from siirl_dask.driver.resume import ResumePoint, find_resume_point
from siirl_dask.errors import RunError
from siirl_dask.planner import DAG
from siirl_dask.runs.checkpoints import Checkpoint, damage_of

logger = logging.getLogger("siirl_dask.driver")


def verified_resume_point(
    config: Config, dag: DAG, client: Client, members: Mapping[str, str], *, fresh: bool, force: bool
) -> ResumePoint:
    """Return where the run begins, like ``find_resume_point``: at the newest checkpoint of which every file is whole.

    Those that are passed over are named in the log. CheckpointError if there are checkpoints and none is whole.
    """
    damaged: dict[str, str] = {}
    while True:
        resume = find_resume_point(config, dag, fresh=fresh, force=force, damaged=damaged)
        if resume.found is None or not (damage := _damage(client, members, resume.found, config.cluster.stall_timeout)):
            for text in resume.passed_over:
                logger.warning("%s; it is passed over", text)
            return resume
        damaged[resume.found.url] = damage


def _damage(client: Client, members: Mapping[str, str], found: Checkpoint, timeout: float) -> str:
    """Return what is wrong with the checkpoint; empty if nothing is. The files are shared out among the workers."""
    addresses, url = list(members.values()), absolute(found.url)
    files = sorted(found.files().items(), key=lambda file: -file[1].nbytes)
    load = dict.fromkeys(addresses, 0)
    futures: list[Future[str]] = []
    for name, written in files:  # the largest first, each to the worker that has least to read
        address = min(addresses, key=load.__getitem__)
        load[address] += written.nbytes
        futures.append(client.submit(damage_of, url, {name: written}, workers=[address], pure=False))
    try:
        return next(filter(None, _results(futures, url, timeout)), "")
    finally:
        client.cancel(futures)


def _results(futures: Collection[Future[str]], url: str, timeout: float) -> Iterator[str]:
    """Yield the results as they come. RunError when none does for ``timeout`` seconds, or a file cannot be read."""
    pending = set(futures)
    while pending:
        try:
            done, pending = wait(pending, timeout=timeout, return_when="FIRST_COMPLETED")
        except TimeoutError as error:
            raise RunError(f"no worker could read a file of {url} in {timeout:g} s (cluster.stall_timeout)") from error
        for future in done:
            try:
                yield future.result()
            except OSError as error:
                raise RunError(f"{url} cannot be read by a worker: {type(error).__name__}: {error}") from error
