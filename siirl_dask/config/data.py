"""Where prompts come from, and how rows move."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from siirl_dask.config.checks import at_least, parse_bytes
from siirl_dask.errors import ConfigError


class TransportMode(StrEnum):
    """By which rows travel between two workers. ``auto`` finds out for each pair."""

    auto = "auto"
    """Shared memory between processes of one host, messages between others."""
    dask = "dask"
    """Messages over the cluster's own comms, always."""
    shm = "shm"
    """Shared memory, always: a pair that has none is an error."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    url: str = "???"
    """A Parquet folder or file, or a table of siirl_storage, on any fsspec URL."""
    prepare: str | None = None
    """``module:function``, called with the Config before anything starts when there is nothing at ``data.url``."""
    batch_size: int = 32
    """Prompts per step, over all workers."""
    prompt: str = "prompt"
    """Column of the prompt; a dot goes into a struct."""
    answer: str = "answer"
    """Column of the answer; a dot goes into a struct, as in ``reward_model.ground_truth``."""
    max_prompt_length: int = 1024
    """Tokens. A longer prompt is dropped from its step, and counted."""
    transport: TransportMode = TransportMode.auto
    """How rows move between workers: ``auto``, ``dask`` or ``shm``."""
    memory_limit: str = "2GiB"
    """What a worker may use to move rows, beyond its own part and its result; partitions that wait beyond it spill."""
    spill_directory: str | None = None
    """Where they spill to: a folder on every worker's machine; where none is given, that for temporary files."""
    quadratic_from: int = 0
    """Tokens at which attention costs a row as much as everything else, about 6 x hidden size: rows are balanced by
    tokens + tokens^2 / quadratic_from. 0 balances by tokens alone.
    """

    def __post_init__(self) -> None:
        at_least("data", 1, batch_size=self.batch_size, max_prompt_length=self.max_prompt_length)
        at_least("data", 0, quadratic_from=self.quadratic_from)
        if parse_bytes("data.memory_limit", self.memory_limit) < 2**20:
            raise ConfigError(f"data.memory_limit={self.memory_limit!r}: expected at least 1MiB")
