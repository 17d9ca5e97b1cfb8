"""Config groups of the data: prompts and the transport of rows between workers, and of the
storage of files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any

from siirl_storage import RETRY_SECONDS

from siirl_dask.config.checks import at_least, located, parse_bytes, parse_ports
from siirl_dask.errors import ConfigError


class TransportMode(StrEnum):
    """Transport of rows between two workers."""

    auto = "auto"
    """Shared memory between processes of one host, messages between hosts; decided for each
    pair."""
    dask = "dask"
    """Messages for every pair, over the comms that rows take between hosts."""
    shm = "shm"
    """Shared memory for every pair; a pair without it is an error."""


class Durability(StrEnum):
    """When the rows that a step has generated, and those that it saves, are on the store."""

    none = "none"
    """Never: nothing is saved, and a run that stops repeats its steps from the newest
    checkpoint."""
    asynchronous = "async"
    """Soon: a worker writes its rows while it goes on with the step, one table at a time."""
    sync = "sync"
    """At once: a worker goes on when its rows are written."""


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """``storage``: reads and writes of all files, on any store."""

    durability: Durability = Durability.asynchronous
    """When the rows that a step has generated, and those that it saves, are on the store: ``none``,
    ``async`` or ``sync``. What is there when a run stops is never generated again.
    """

    retry_seconds: float = RETRY_SECONDS
    """Seconds for which an operation on a store is tried again that failed with an error that may
    pass: a lost connection, a timeout, throttling, a failure inside the store. 0: it fails at once.
    """

    def __post_init__(self) -> None:
        at_least("storage", 0, retry_seconds=self.retry_seconds)


@dataclass(kw_only=True, slots=True)
class DataSource:
    """One dataset of ``data.sources``."""

    url: str
    """A Parquet folder or file, or a table of siirl_storage, on any fsspec URL."""
    weight: float = 1.0
    """The source's part of all prompts, beside the weights of the others."""
    prompt: str | None = None
    """Column of the prompt. None: as ``data.prompt``."""
    answer: str | None = None
    """Column of the answer. None: as ``data.answer``."""

    def __post_init__(self) -> None:
        self.url = located("url of a source of data.sources", self.url)


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """``data``: the dataset, its columns, and the movement of rows."""

    url: str | None = "???"
    """A Parquet folder or file, or a table of siirl_storage, on any fsspec URL. None:
    ``sources`` are given."""
    sources: dict[str, DataSource] = field(default_factory=dict)
    """Several datasets in place of ``url``, by name. Prompts are taken in exact proportion to
    their weights."""
    prepare: str | None = None
    """Function, as ``module:function``, that makes the dataset; called with the Config if nothing
    is at ``data.url``.
    """
    prepare_options: dict[str, Any] = field(default_factory=dict)
    """Options of ``prepare``, by name, such as ``{source: /datasets/gsm8k}``."""
    batch_size: int = 32
    """Prompts per step, over all workers."""
    prompt: str = "prompt"
    """Column of the prompt; a dot leads into a struct."""
    answer: str = "answer"
    """Column of the answer; a dot leads into a struct, as in ``reward_model.ground_truth``."""
    continue_answers: bool = False
    """Let the model go on with a prompt's last message where that is the assistant's. False: such a
    prompt is refused.
    """
    max_prompt_length: int = 1024
    """Longest prompt in tokens. A longer one is dropped from its step, and counted."""
    transport: TransportMode = TransportMode.auto
    """Transport of rows between workers: ``auto``, ``dask`` or ``shm``."""
    port: str | None = None
    """Port of each worker's listener for its peers' requests for rows, or a range such as
    ``20000:20100``, of which each worker of a host takes the first that is free. None: any free
    port.
    """
    prefetch: bool | None = None
    """Rows that an engine has finished travel while it generates others. None: between hosts
    only."""
    memory_limit: str = "2GiB"
    """Memory of a worker for moving rows, beyond its own rows and the result; partitions that
    exceed it spill."""
    read_limit: str | None = None
    """Largest size, once decoded, of a row group of the dataset or of a worker's prompts of a step.
    None: as ``memory_limit``.
    """
    spill_directory: str | None = None
    """Folder on every worker's machine for partitions that spill. None: the folder for temporary
    files."""
    quadratic_from: int = 0
    """Tokens at which attention costs a row as much as everything else, about 6 x hidden size: rows
    are balanced by tokens + tokens^2 / quadratic_from. 0 balances by tokens alone.
    """

    def __post_init__(self) -> None:
        self._check_sources()
        if self.url:
            self.url = located("data.url", self.url)
        if self.prepare_options and self.prepare is None:
            raise ConfigError("data.prepare_options are given without data.prepare")
        at_least("data", 1, batch_size=self.batch_size, max_prompt_length=self.max_prompt_length)
        at_least("data", 0, quadratic_from=self.quadratic_from)
        if self.port is not None:
            parse_ports("data.port", self.port)
        for key, value in {
            "data.memory_limit": self.memory_limit,
            "data.read_limit": self.read_limit,
        }.items():
            if value is not None and parse_bytes(key, value) < 2**20:
                raise ConfigError(f"{key}={value!r}: expected at least 1MiB")

    @property
    def urls(self) -> list[str]:
        """URLs of the datasets to train on."""
        if self.url is None:
            return [source.url for source in self.sources.values()]
        return [self.url]

    def _check_sources(self) -> None:
        if self.sources and self.url == "???":
            self.url = None
        if self.sources and self.url is not None:
            raise ConfigError(
                f"data.url={self.url!r} and data.sources are both given: expected one of them; "
                "data.url=null takes away what a base gives"
            )
        if not self.sources and not self.url:
            raise ConfigError(
                f"data.url={self.url!r}: expected the URL of a dataset, or several in data.sources"
            )
        for name, source in self.sources.items():
            if not isinstance(name, str) or not name.strip():
                raise ConfigError(
                    f"data.sources has a source {name!r}: expected a text as its name"
                )
            if not source.url:
                raise ConfigError(
                    f"data.sources.{name}.url={source.url!r}: expected the URL of a dataset"
                )
            if not 0 < source.weight < inf:
                raise ConfigError(
                    f"data.sources.{name}.weight={source.weight}: expected a number above 0"
                )
