"""Plans the phases of a run (training, validation, test): their DAGs, datasets and chains."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
from filelock import FileLock, Timeout
from fsspec.implementations.local import LocalFileSystem
from siirl_storage import open_fs

from siirl_dask.config import Config, Durability
from siirl_dask.config.file import ConfigFile
from siirl_dask.coordinator import (
    Dataset,
    Source,
    dataset_schema,
    exists,
    is_vacant,
    open_source,
    training_dataset,
)
from siirl_dask.driver.checks.continued import check_continued
from siirl_dask.driver.checks.unread_groups import check_read
from siirl_dask.errors import ConfigError, DataError, PlanError, did_you_mean
from siirl_dask.images import check_layout
from siirl_dask.planner import DAG, Hosts, Phase, Plan, bind, compile_chains, dag_from_spec, resolve
from siirl_dask.recipes import scored_as_training, validation_dag
from siirl_dask.runs.identity_file import DataVersion, DueTable, ModelVersion, agent_model_key
from siirl_dask.schema import (
    IDENTITY,
    IMAGES,
    OBSERVED_IMAGES,
    ORIGIN,
    REFERENCE_LOGPROBS,
    SOURCE_NAME,
    TYPES,
    DataType,
    Schema,
    type_at,
)
from siirl_dask.wording import redacted

logger = logging.getLogger("siirl_dask.driver")
_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.*",
    "spiece.model",
    "sentencepiece*.model",
)
"""Names of files that hold a tokenizer's vocabulary."""
Phases = dict[str, tuple[Plan, Dataset]]
"""The plan and the dataset of each phase, by the name of the plan (``Iteration.plan``); the
first has every role."""


def plan_phases(
    config: Config,
    dag: DAG,
    validation: DAG | None,
    workers: Sequence[str],
    hosts: Hosts | None = None,
    *,
    assume_columns: bool = False,
) -> Phases:
    """Return the plans of a run on ``workers``. ConfigError, DataError or PlanError for a run that
    cannot work.

    ``hosts`` gives the host of each worker; None: all are on one.

    Opens the datasets to read their columns; with ``assume_columns`` an absent one is assumed to
    have the columns that the configuration names.
    """
    _check(config, dag, validation)
    datasets: dict[Phase, tuple[DAG, Dataset]] = {
        Phase.TRAIN: (dag, training_dataset(config.data, config.run.seed))
    }
    if validation is not None and config.validation.url:
        datasets[Phase.VALIDATION] = (validation, Source.of(config.data, url=config.validation.url))
        if config.validation.test_url:
            nodes = []
            for node in validation.nodes:
                nodes.append(replace(node, save_as="test") if node.save_as else node)
            test = Source.of(config.data, url=config.validation.test_url)
            datasets[Phase.TEST] = (replace(validation, nodes=tuple(nodes)), test)
    phases: Phases = {}
    for phase, (graph, dataset) in datasets.items():
        absent = set()
        if assume_columns:
            absent = {source.url for source in dataset.sources if _is_to_come(config, source.url)}
        dataset, schema = _open(config, dataset, absent)
        _check_images(config, dataset, schema)
        plan = compile_chains(
            graph, workers, schema, config.cluster.placement, hosts, overlap=config.run.overlap
        )
        phases[phase] = (plan, dataset)
    return phases


def model_versions(config: Config) -> dict[str, ModelVersion]:
    """Return the state of the model that training begins with, and of that of each agent, by
    the configuration's key; those that are not there, or not to be reached from here, are left out.
    """
    paths = {"model.path": config.model.path}
    for name, agent in config.agents.items():
        paths[agent_model_key(name)] = agent.model.path
    versions = {path: ModelVersion.of(path) for path in dict.fromkeys(paths.values()) if path}
    absent = ModelVersion()
    return {
        key: versions[path] for key, path in paths.items() if versions.get(path, absent) != absent
    }


def data_versions(phases: Phases) -> dict[str, DataVersion]:
    """Return the state of each table that is open, by the configuration's key that names it.

    Keys of tables to validate on have the URL as well: a resume may validate on other data, at
    another URL.
    """
    dataset = phases[Phase.TRAIN][1]
    if isinstance(dataset, Source):
        named = {"data.url": dataset}
    else:
        named = {f"data.sources.{share.name}": share.source for share in dataset.shares}
    for phase, key in {
        Phase.VALIDATION: "validation.url",
        Phase.TEST: "validation.test_url",
    }.items():
        if phase in phases:
            (source,) = phases[phase][1].sources
            named[f"{key}={redacted(source.url)}"] = source
    return {
        key: DataVersion.of(source.table)
        for key, source in named.items()
        if source.table is not None
    }


def due_tables(config: Config, phases: Phases, done: int) -> dict[str, DueTable]:
    """Return the tables of which a run that goes on after step ``done`` saves rows; none without
    durability.
    """
    if config.storage.durability is Durability.none:
        return {}
    first = {Phase.TRAIN: done + 1, Phase.VALIDATION: 0, Phase.TEST: 0}
    if done:
        first[Phase.VALIDATION] = done + 1
    due: dict[str, DueTable] = {}
    for phase, step in first.items():
        if phase not in phases:
            continue
        plan, _ = phases[phase]
        for node in plan.dag.nodes:
            if node.save_as and not node.lag:  # the rows of a step come later otherwise, or never
                due[node.save_as] = DueTable(phase=phase, since=step)
    return due


def _is_to_come(config: Config, url: str) -> bool:
    """Return whether there is no dataset at ``url`` yet: nothing is there, or what ``data.prepare``
    replaces.
    """
    if exists(url):
        return False
    if config.data.prepare is not None:
        return True
    return is_vacant(url)


def _open(config: Config, dataset: Dataset, absent: Collection[str]) -> tuple[Dataset, Schema]:
    """Return the dataset with its tables open, except those at the URLs ``absent``, and the
    columns to load.
    """

    def with_table(source: Source) -> Source:
        if source.url in absent:
            return source
        return replace(source, table=open_source(source))

    def columns(source: Source) -> Schema:
        if source.table:
            return open_source(source).schema
        return assumed_columns(config, source)

    opened = dataset.each(with_table)
    return opened, dataset_schema(opened, columns)


def _check_images(config: Config, dataset: Dataset, schema: Schema) -> None:
    """Raise DataError where the dataset has no column ``images.column``, or one that holds no
    images.
    """
    column = config.images.column
    if column is None:
        return
    label = f"images.column={column!r}: the column of dataset {dataset.sources[0].url!r}"
    kind = type_at(schema, column)
    if kind is None:
        known = [name for name in schema.names if name not in (*IDENTITY, *ORIGIN)]
        raise DataError(f"{label} is not there (there is: {known}){did_you_mean(column, known)}")
    check_layout(kind, label)


def assumed_columns(config: Config, source: Source | None = None) -> Schema:
    """Return the dataset columns that the configuration names: texts, and whole numbers for
    expected lengths.

    ``source`` may have names of its own for prompt and answer.
    """
    names = config.data if source is None else source
    texts = [names.prompt, names.answer]
    if (
        config.validation.source_column is not None
        and config.validation.source_column != SOURCE_NAME
    ):
        texts.append(config.validation.source_column)
    paths: dict[str, DataType] = dict.fromkeys(texts, pa.string())
    if config.rollout.expected_length_column is not None:
        paths[config.rollout.expected_length_column] = pa.int64()
    if config.images.column is not None:
        paths[config.images.column] = TYPES[IMAGES]
    tree: dict[str, list[tuple[str, DataType]]] = {}
    for path, kind in paths.items():
        if not all(path.split(".")):
            raise ConfigError(
                f"column {path!r}: expected a name, or names with dots between them for a struct's "
                "field"
            )
        column, _, field = path.partition(".")
        tree.setdefault(column, []).append((field, kind))
    return pa.schema({column: _column_type(fields) for column, fields in tree.items()})


def _column_type(fields: Sequence[tuple[str, DataType]]) -> DataType:
    """Return a column's type, given the dotted paths into it with their types; an empty path is
    the column itself.
    """
    inner: dict[str, list[tuple[str, DataType]]] = {}
    for path, kind in fields:
        if path == "":
            continue
        name, _, rest = path.partition(".")
        inner.setdefault(name, []).append((rest, kind))
    if not inner:
        return fields[0][1]
    return pa.struct([(name, _column_type(rest)) for name, rest in inner.items()])


def validation_of(config: Config, dag: DAG, validation: DAG | None) -> DAG | None:
    """Return ``validation``, else the default validation of ``dag``; None without validation data.
    Its rewards get the columns that those of ``dag`` get.

    ConfigError if the training DAG lacks the roles that the default needs.
    """
    if validation is not None:
        return scored_as_training(validation, dag)
    if not config.validation.url:
        return None
    try:
        return scored_as_training(validation_dag(config, dag), dag)
    except PlanError as error:
        raise ConfigError(
            f"validation.url is set, and no validation goes with this training DAG: {error}; give "
            "validation_nodes, or leave validation.url out"
        ) from error


def worker_names(config: Config) -> list[str]:
    """Return the names that workers started on this machine will have, for a plan before they
    start.
    """
    return [str(worker) for worker in range(config.cluster.workers)]


def prepare(config: Config) -> bool:
    """Call ``data.prepare`` if it is set and its files are not there; return whether they were made
    now.

    Of several starts on a host that prepare one local folder, one does, and the others wait and use
    its files.
    """
    if config.data.prepare is None:
        return False
    make = bind(resolve(config.data.prepare), config.data.prepare_options, "data.prepare_options")
    if _is_prepared(config):
        return False
    with _lock(_prepared_folder(config)):
        if _is_prepared(config):
            return True  # another start has made it meanwhile
        make(config)
    return True


def _is_prepared(config: Config) -> bool:
    """Return whether all datasets to train on are there, and complete models if they are in the
    same folder.

    A model without weights or tokenizer is left by an interrupted preparation or copy. A missing
    tokenizer would be replaced silently.
    """
    if not all(map(exists, config.data.urls)):
        return False
    folder = _prepared_folder(config)
    if folder is None:
        return True
    models = [config.model, *(agent.model for agent in config.agents.values())]
    paths = {Path(model.path).absolute() for model in models}
    return all(_is_complete_model(path) for path in paths if folder in path.parents)


def _is_complete_model(model: Path) -> bool:
    if not (model / "config.json").is_file():
        return False
    if not any(model.glob("*.safetensors")) and not any(model.glob("*.bin")):
        return False
    return any(any(model.glob(pattern)) for pattern in _TOKENIZERS)


def _prepared_folder(config: Config) -> Path | None:
    """Return the folder that ``data.prepare`` fills; None unless that is a local one."""
    if config.data.url is None:
        return None
    fs, path = open_fs(config.data.url)
    if isinstance(fs, LocalFileSystem):
        return Path(path).parent
    return None


@contextmanager
def _lock(folder: Path | None) -> Iterator[None]:
    """Wait until no other process of this host prepares ``folder``, and keep others out."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".preparing.lock")
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.warning("waiting for another start, which prepares %s", folder)
            lock.acquire()
    except (NotImplementedError, OSError) as error:  # no locks on this file system
        logger.warning("%s cannot be locked: %s", folder, error)
    try:
        yield
    finally:
        lock.release()


def _check(config: Config, dag: DAG, validation: DAG | None) -> None:
    """Raise ConfigError where groups of the configuration, or configuration and DAG, contradict
    each other.
    """
    for name, value in {"data.url": config.data.url, "model.path": config.model.path}.items():
        if value == "???":
            raise ConfigError(f"{name} is not set: give it in the config or as {name}=...")
    check_read(config, [dag] if validation is None else [dag, validation])
    written = {name for node in dag.nodes for name in node.contract.writes.names}
    if config.algorithm.kl_coefficient > 0 and REFERENCE_LOGPROBS not in written:
        raise ConfigError(
            f"algorithm.kl_coefficient={config.algorithm.kl_coefficient} needs "
            f"{REFERENCE_LOGPROBS!r}, which no node of the DAG writes: add a node that runs "
            "siirl_dask.nodes:reference_logprobs, or set it to 0"
        )
    ahead = config.rollout.steps_ahead
    lags = {node.name: node.lag for node in dag.nodes if node.lag}
    if set(lags.values()) != {ahead} - {0}:
        raise ConfigError(
            f"rollout.max_staleness={config.rollout.max_staleness} generates {ahead} steps ahead, "
            "and nodes lag by "
            f"{lags}: expected lag={ahead} of the node that loads weights, and 0 of the others"
        )
    if config.images.column is not None and IMAGES not in written:
        raise ConfigError(
            f"images.column={config.images.column!r} and no node reads that column: give the node "
            "that runs "
            "siirl_dask.nodes:encode_prompts the images as well, as in with: {images: ${images}, "
            "...}"
        )
    if config.data.continue_answers and not any(
        node.options.get("continue_answers") for node in dag.nodes
    ):
        raise ConfigError(
            "data.continue_answers=true and no node reads it: give the node that runs "
            "siirl_dask.nodes:encode_prompts "
            "the key as well, as in with: {continue_answers: ${data.continue_answers}, ...}"
        )
    if config.images.observations and OBSERVED_IMAGES not in written:
        raise ConfigError(
            "images.observations=true and no node plays with images: give the node that runs "
            "siirl_dask.nodes:play the "
            "images, as in with: {images: ${images}, ...}, or leave it out"
        )
    check_continued(config, dag)
    if validation is not None:
        staged = [node.label for node in validation.nodes if node.stage]
        if staged:
            raise ConfigError(
                f"{staged[0]} of the validation has stage=true: no step goes on from it; leave "
                "stage out"
            )
        roles = {role.name for role in dag.roles}
        if config.validation.url and not roles.issuperset(role.name for role in validation.roles):
            raise ConfigError(
                "the validation DAG has roles that the training DAG has not: both run on the same "
                "resources"
            )
    if config.validation.test_url and not config.validation.url:
        raise ConfigError("validation.test_url needs validation.url")


def dags(file: ConfigFile) -> tuple[DAG, DAG | None]:
    """Return the training and the validation DAG of a config file; None if it has no validation
    nodes.
    """
    roles = file.role_places
    places = file.validation_node_places
    try:
        dag = dag_from_spec(file.roles, file.nodes, role_places=roles, node_places=file.node_places)
        if not file.validation_nodes:
            return dag, None
        return dag, dag_from_spec(
            file.roles, file.validation_nodes, role_places=roles, node_places=places
        )
    except PlanError as error:
        raise file.blamed(error) from error
