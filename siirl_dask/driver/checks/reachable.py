"""Checks on the workers, before a run starts, that each can read and write the run's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed import Client
from siirl_storage import absolute

from siirl_dask.config import ClusterConfig
from siirl_dask.coordinator import Mixture
from siirl_dask.driver.phases import Phases
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.models.remote import is_remote
from siirl_dask.planner import LoadPrompts
from siirl_dask.runs.folder import probe
from siirl_dask.worker.process.probe import find_unreachable

_NAMED = 4  # sentences in a message; it counts the others


class Unreachable(ConfigError):
    """A worker cannot read or write something that the driver can."""


def check_reachable(
    client: Client,
    members: Mapping[str, str],
    phases: Phases,
    reads: Mapping[str, Sequence[str]],
    run_url: str,
) -> None:
    """Raise Unreachable, by worker, host and path, unless each worker reaches its files as this
    process does.

    ``reads`` has the folders that the workers of each role read. Workers that load prompts read the
    datasets, and all write below ``run_url``.
    """
    workers_by_needs: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for worker in members:
        workers_by_needs.setdefault(_read_by(worker, phases, reads), []).append(worker)
    problems: list[str] = []
    with probe(run_url) as name:
        for needed, workers in workers_by_needs.items():
            addresses = [members[worker] for worker in workers]
            answers = client.run(
                find_unreachable, dict(needed), absolute(run_url), name, workers=addresses
            )
            for worker in workers:
                host, found = answers[members[worker]]
                problems += [
                    f"for worker {worker!r} on host {host!r} {problem}" for problem in found
                ]
    if problems:
        more = ""
        if len(problems) > _NAMED:
            more = f"; and {len(problems) - _NAMED} more"
        expected = (
            "; expected what the configuration names (model.path, data.url, run.url, ...) at the "
            "same place on every host: on a file system that all share, or a URL such as s3://...; "
            "a model of the hub is hf://org/name"
        )
        raise Unreachable("; ".join(problems[:_NAMED]) + more + expected)


def check_models_here(cluster: ClusterConfig, reads: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError, with the nearest name, for a model that is not on this machine, where the
    workers will be. ``reads`` has the folders that the workers of each role read.
    """
    if cluster.exists or cluster.spec:
        return
    for role, urls in reads.items():
        for what, url in zip(("model", "adapters"), urls, strict=False):
            if is_remote(url) or Path(url).exists():
                continue
            beside = (str(other) for other in Path(url).parent.glob("*"))
            hint = did_you_mean(url, beside)
            if "$" in url:
                hint = "; an environment variable is written as in ${oc.env:HOME}/models"
            raise ConfigError(
                f"the {what} of role {role!r} is not at {url!r}: expected a Hugging Face folder, or "
                f"a URL such as hf://org/name{hint}"
            )


def check_model_folders(reads: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for what is there on this machine in the place of a model, and is none.
    ``reads`` has the folders that the workers of each role read, the model's first.
    """
    for role, urls in reads.items():
        url = next(iter(urls), "")
        if not url or is_remote(url) or not Path(url).exists():
            continue
        folder = Path(url)
        if (folder / "config.json").is_file():
            continue
        hint = ""
        if folder.is_file():
            found = "is a file"
        elif (folder / "adapter_config.json").is_file():
            found = "holds adapters alone"
            hint = "; give the model that they were trained on, and trainer.lora.path for them"
        else:
            found = "has no config.json"
        raise ConfigError(
            f"the model of role {role!r}: {url!r} {found}: expected a Hugging Face folder, with "
            f"config.json, weights and tokenizer{hint}"
        )


def _read_by(
    worker: str, phases: Phases, reads: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, str], ...]:
    """Return the files that a worker must be able to read: a name for messages, and the URL."""
    plan, _ = next(iter(phases.values()))
    needed: dict[str, str] = {}
    for role, urls in reads.items():
        if worker not in plan.placement.get(role, ()):
            continue
        for what, url in zip(("model", "adapters"), urls, strict=False):
            if not is_remote(url):  # its host fetches it: see models.py
                needed[f"the {what} of role {role!r}"] = url
    for phase, (phase_plan, dataset) in phases.items():
        if not any(isinstance(link, LoadPrompts) for link in phase_plan.chains[worker].flat):
            continue
        labels = [""]
        if isinstance(dataset, Mixture):
            labels = [f" {share.name!r}" for share in dataset.shares]
        for label, source in zip(labels, dataset.sources, strict=True):
            needed[f"the {phase} dataset{label}"] = absolute(source.url)
    return tuple(needed.items())
