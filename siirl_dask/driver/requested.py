"""Turns what a caller gives for a run, in any of its forms, into a configuration and DAGs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from siirl_dask.config import Config
from siirl_dask.config.file import ConfigSource, load_config_file
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError
from siirl_dask.planner import DAG

Recipe = Callable[[Config], DAG]
DATA_URL = "${run.url}/data"
"""Place of a collection's table where the configuration names none."""


@dataclass(frozen=True, slots=True)
class RequestedRun:
    """A run as its caller wants it."""

    config: Config
    dag: DAG
    validation: DAG | None


def requested_run(
    config: ConfigSource,
    dag: DAG | Recipe | None,
    validation: DAG | Recipe | None,
    *,
    data_url: str | None = None,
) -> RequestedRun:
    """Return the run. ``config`` is read as ``load`` reads it, a recipe makes its DAG of it, and
    None takes the DAGs that the configuration spells. ``data_url`` stands for a ``data.url`` that
    it does not set.

    ConfigError without a DAG, and for a configuration that cannot be used.
    """
    if isinstance(config, Config):
        made = config
        if config.data.url == "???" and data_url is not None:
            url = data_url.replace("${run.url}", config.run.url)
            made = replace(config, data=replace(config.data, url=url))
        spelled: tuple[DAG | None, DAG | None] = (None, None)
    else:
        file = load_config_file(config, data_url=data_url)
        made = file.config
        spelled = (None, None)
        if dag is None and file.nodes:
            spelled = dags(file)
    training = _made(dag, made)
    if training is None:
        training = spelled[0]
    if training is None:
        raise ConfigError(
            "the run has no DAG: give a recipe, as in run(config, siirl_dask.grpo), or a "
            "configuration with one, such as base: siirl_dask:dags/grpo.yaml"
        )
    checked = _made(validation, made)
    if checked is None:
        checked = spelled[1]
    return RequestedRun(made, training, checked)


def _made(dag: DAG | Recipe | None, config: Config) -> DAG | None:
    if dag is None or isinstance(dag, DAG):
        return dag
    return dag(config)
