"""Brings models that the configuration names by URL to every host of the run, before anything
starts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from distributed import Client
from rich.filesize import decimal

from siirl_dask.config import ClusterConfig
from siirl_dask.driver.clusters.calls import complete
from siirl_dask.errors import ConfigError
from siirl_dask.models.cache import fetch, is_here
from siirl_dask.models.remote import HUB, RemoteModel, find_model, is_remote
from siirl_dask.observe import Progress
from siirl_dask.planner import Plan
from siirl_dask.wording import redacted
from siirl_dask.worker.process.probe import bring_models, forget_models

logger = logging.getLogger("siirl_dask.driver")
Models = Mapping[str, RemoteModel]
"""Models by URL, with the files that they have there now: every host gets these."""
_NAMED = 4  # sentences in a message
_FORGET_TIMEOUT = 10.0  # seconds for the workers to delete what their hosts have fetched


def find_models(reads: Mapping[str, Sequence[str]]) -> Models:
    """Return the models at URLs among the folders that roles read. ConfigError, by name, where
    one is not there.
    """
    folders = dict.fromkeys(folder for folders in reads.values() for folder in folders)
    models = {folder: find_model(folder) for folder in folders if is_remote(folder)}
    for url, model in models.items():
        if not model.has_weights:
            there = ", ".join(file.name for file in model.files)
            raise ConfigError(f"model {url!r}: there are no weights (there is: {there})")
    return models


def fetch_here(models: Models, cluster: ClusterConfig, progress: Progress) -> None:
    """Fetch the models if the workers are processes of this machine. ConfigError for one that
    cannot be fetched.
    """
    if cluster.exists or cluster.spec:
        return
    for model in models.values():
        if is_here(model):
            continue
        if model.url.startswith(HUB):
            # huggingface_hub shows bars of its own
            progress.note(f"fetching {model.url}: {decimal(model.nbytes)}")
            fetch(model)
        else:
            with progress.transfer(f"fetching {model.url}", model.nbytes) as add:
                fetch(model, add)


def fetch_on_workers(
    client: Client,
    cluster: ClusterConfig,
    members: Mapping[str, str],
    plan: Plan,
    reads: Mapping[str, Sequence[str]],
    models: Models,
    progress: Progress,
) -> None:
    """Fetch the models of each worker's roles on the worker's host, once for all workers of a host.

    Does nothing for workers on this machine, for which ``fetch_here`` has fetched them.

    ``reads`` has the folders that the workers of each role read. ConfigError by worker and host.
    """
    if not models or not (cluster.exists or cluster.spec):
        return
    workers_by_urls: dict[tuple[str, ...], list[str]] = {}
    for worker in members:
        needed: set[str] = set()
        for role, urls in reads.items():
            if worker in plan.placement.get(role, ()):
                needed.update(urls)
        workers_by_urls.setdefault(tuple(sorted(needed & models.keys())), []).append(worker)
    began = time.monotonic()
    fetched_bytes = 0
    problems: list[str] = []
    names = ", ".join(f"{model.url} ({decimal(model.nbytes)})" for model in models.values())
    progress.note(f"hosts fetch what they have not got of {names}")
    for model_urls, workers in workers_by_urls.items():
        addresses = [members[worker] for worker in workers]
        wanted = [models[url] for url in model_urls]
        answers = complete(client, partial(client.run, bring_models, wanted, workers=addresses))
        for worker in workers:
            host, nbytes, problem = answers[members[worker]]
            fetched_bytes += nbytes
            if problem:
                problems.append(f"worker {worker!r} on host {host!r}: {problem}")
    if problems:
        more = ""
        if len(problems) > _NAMED:
            more = f"; and {len(problems) - _NAMED} more"
        raise ConfigError("; ".join(problems[:_NAMED]) + more)
    if fetched_bytes:
        progress.note(
            f"hosts have fetched {decimal(fetched_bytes)} in {time.monotonic() - began:.1f} s"
        )


@contextmanager
def forgotten(
    client: Client, members: Mapping[str, str], models: Sequence[RemoteModel]
) -> Iterator[None]:
    """Delete the copies of models that the workers' hosts have fetched, at the end; what stays
    is in the log.
    """
    try:
        yield
    finally:
        if models:
            try:
                call = partial(client.run, forget_models, models, workers=list(members.values()))
                answers = complete(client, call, timeout=_FORGET_TIMEOUT)
                remaining = {
                    f"on host {host!r}: {problem}" for host, problem in answers.values() if problem
                }
            except Exception as error:
                # a worker or the scheduler has gone: the error that ended the pass matters more
                remaining = {f"on some host: {type(error).__name__}: {error}"}
            for problem in sorted(remaining):
                logger.warning(
                    "a copy of the model %s may stay in the cache %s",
                    redacted(models[0].url),
                    problem,
                )
