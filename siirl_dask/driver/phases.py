"""The phases of a run (training, validation, test): their DAGs, their datasets, their plans, and what cannot go
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from siirl_storage import StorageError, TableNotFound, open_table

from siirl_dask.config import Config
from siirl_dask.coordinator.dataloader import Source, open_source, source_schema
from siirl_dask.errors import ConfigError
from siirl_dask.planner import DAG, Plan, compile_chains, resolve
from siirl_dask.schema import REFERENCE_LOGPROBS, TOKEN_VERSIONS, Schema

PREPARED = pa.schema({"prompt": pa.string(), "answer": pa.string()})
"""Columns that are assumed of a dataset which ``data.prepare`` has yet to make."""

Phases = dict[str, tuple[Plan, Source]]


def plan_phases(
    config: Config, dag: DAG, validation: DAG | None, workers: Sequence[str], assumed: Schema | None = None
) -> Phases:
    """The plans of a run on ``workers``. ConfigError, DataError or PlanError for what cannot run.

    Opens the datasets for their columns; ``assumed`` are those of a dataset that ``data.prepare`` has yet to make.
    """
    _check(config, dag, validation)
    shuffled = Source(
        url=config.data.url,
        prompt=config.data.prompt,
        answer=config.data.answer,
        batch_size=config.data.batch_size,
        seed=config.run.seed,
    )
    sources = {"train": (dag, shuffled)}
    if validation is not None and config.validation.url:
        whole = replace(shuffled, url=config.validation.url, batch_size=None, seed=None)
        sources["validation"] = (validation, whole)
        if config.validation.test_url:
            tested = replace(validation, nodes=tuple(replace(n, keep=n.keep and "test") for n in validation.nodes))
            sources["test"] = (tested, replace(whole, url=config.validation.test_url))
    phases = {}
    for phase, (graph, source) in sources.items():
        found = assumed if assumed is not None and not exists(source.url) else open_source(source).schema
        plan = compile_chains(graph, workers, source_schema(found, source), config.cluster.placement)
        phases[phase] = (plan, source)
    return phases


def worker_names(config: Config) -> list[str]:
    """The names that workers started on this machine will have; for a plan before there are any."""
    return [str(worker) for worker in range(config.cluster.workers)]


def prepare(config: Config) -> None:
    """Make the dataset where there is none, if the config says how."""
    if config.data.prepare is not None:
        make = resolve(config.data.prepare)
        if not exists(config.data.url):
            make(config)


def exists(url: str) -> bool:
    """Whether there is a table at ``url``, be it a damaged one."""
    try:
        open_table(url)
    except TableNotFound:
        return False
    except StorageError:
        return True
    return True


def _check(config: Config, dag: DAG, validation: DAG | None) -> None:
    """What no single key can say: groups of the config, and the config and the DAG, against one another."""
    for name, value in {"data.url": config.data.url, "model.path": config.model.path}.items():
        if value == "???":
            raise ConfigError(f"{name} is not set: give it in the config or as {name}=...")
    written = {name for node in dag.nodes for name in node.contract.writes.names}
    if config.algorithm.kl_coefficient > 0 and REFERENCE_LOGPROBS not in written:
        raise ConfigError(
            f"algorithm.kl_coefficient={config.algorithm.kl_coefficient} needs {REFERENCE_LOGPROBS!r}, which no node "
            "of the DAG writes: add a node that runs siirl_dask.nodes:reference_logprobs, or set it to 0"
        )
    ahead, behind = config.rollout.ahead, {node.name: node.behind for node in dag.nodes if node.behind}
    if set(behind.values()) != {ahead} - {0}:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} generates {ahead} steps ahead, and nodes are behind "
            f"as many as {behind}: expected behind={ahead} of the node that loads weights, and 0 of the others"
        )
    if config.rollout.partial and TOKEN_VERSIONS not in written:
        raise ConfigError("rollout.partial=true and no node generates in parts: expected siirl_dask.nodes:generate")
    validated = {role.name for role in validation.roles} if validation is not None and config.validation.url else set()
    if validated - {role.name for role in dag.roles}:
        raise ConfigError("the validation DAG has roles that the training DAG has not: both run on the same resources")
    if config.validation.url and validation is None:
        raise ConfigError("validation.url is set and there are no validation_nodes: add them, or leave it out")
    if config.validation.test_url and not config.validation.url:
        raise ConfigError("validation.test_url needs validation.url")
