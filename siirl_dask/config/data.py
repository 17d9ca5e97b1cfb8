"""Config groups of the data: prompts and the transport of rows between workers, and of the storage of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from siirl_storage import RETRY_SECONDS

from siirl_dask.config.checks import absolute, at_least, parse_bytes
from siirl_dask.errors import ConfigError


class TransportMode(StrEnum):
    """Transport of rows between two workers."""

    auto = "auto"
    """Shared memory between processes of one host, messages between hosts; decided for each pair."""
    dask = "dask"
    """Messages over the cluster's own comms for every pair."""
    shm = "shm"
    """Shared memory for every pair; a pair without it is an error."""


class Durability(StrEnum):
    """When the rows that a step saves are on the store."""

    none = "none"
    """Never: nothing is saved, and a run that stops repeats its steps from the newest checkpoint."""
    asynchronous = "async"
    """Soon: a worker writes its rows while it goes on with the step, one table at a time."""
    sync = "sync"
    """At once: a worker goes on when its rows are written."""


@dataclass(kw_only=True, slots=True)
class StorageConfig:
    """``storage``: reads and writes of all files, on any store."""

    durability: Durability = Durability.asynchronous
    """When the rows that a step saves are on the store: ``none``, ``async`` or ``sync``. What is there when a run stops
    is never generated again.
    """

    retry_seconds: float = RETRY_SECONDS
    """Seconds for which an operation on a store is tried again that failed with an error that may pass: a lost
    connection, a timeout, throttling, a failure inside the store. 0: it fails at once.
    """

    def __post_init__(self) -> None:
        at_least("storage", 0, retry_seconds=self.retry_seconds)


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """``data``: the dataset, its columns, and the movement of rows."""

    url: str = "???"
    """A Parquet folder or file, or a table of siirl_storage, on any fsspec URL."""
    prepare: str | None = None
    """Function, as ``module:function``, that makes the dataset; called with the Config if nothing is at ``data.url``.
    """
    prepare_options: dict[str, Any] = field(default_factory=dict)
    """Options of ``prepare``, by name, such as ``{source: /datasets/gsm8k}``."""
    batch_size: int = 32
    """Prompts per step, over all workers."""
    prompt: str = "prompt"
    """Column of the prompt; a dot leads into a struct."""
    answer: str = "answer"
    """Column of the answer; a dot leads into a struct, as in ``reward_model.ground_truth``."""
    max_prompt_length: int = 1024
    """Longest prompt in tokens. A longer one is dropped from its step, and counted."""
    transport: TransportMode = TransportMode.auto
    """Transport of rows between workers: ``auto``, ``dask`` or ``shm``."""
    prefetch: bool | None = None
    """Rows that an engine has finished travel while it generates others. None: between hosts only."""
    memory_limit: str = "2GiB"
    """Memory of a worker for moving rows, beyond its own rows and the result; partitions that exceed it spill."""
    read_limit: str | None = None
    """Largest size, once decoded, of a row group of the dataset or of a worker's prompts of a step. None: as
    ``memory_limit``.
    """
    spill_directory: str | None = None
    """Folder on every worker's machine for partitions that spill. None: the folder for temporary files."""
    quadratic_from: int = 0
    """Tokens at which attention costs a row as much as everything else, about 6 x hidden size: rows are balanced by
    tokens + tokens^2 / quadratic_from. 0 balances by tokens alone.
    """

    def __post_init__(self) -> None:
        self.url = absolute(self.url)
        if self.prepare_options and self.prepare is None:
            raise ConfigError("data.prepare_options are given without data.prepare")
        at_least("data", 1, batch_size=self.batch_size, max_prompt_length=self.max_prompt_length)
        at_least("data", 0, quadratic_from=self.quadratic_from)
        for key, value in {"data.memory_limit": self.memory_limit, "data.read_limit": self.read_limit}.items():
            if value is not None and parse_bytes(key, value) < 2**20:
                raise ConfigError(f"{key}={value!r}: expected at least 1MiB")
