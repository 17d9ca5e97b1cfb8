"""Arithmetic of an engine's memory on an accelerator that engines have in common: sampler, cache,
milder settings.

Each engine's own is beside its spec (``EngineSpec.memory``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from siirl_dask.config import Dtype, LoraConfig, RolloutConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import Architecture
from siirl_dask.models.shapes import ModelSize

CACHE = "KV cache"
GRAPHS = "graphs"
GRAPHS_BYTES = 10**9
"""Bytes of captured graphs: engines' logs tell of 0.5 to 1.5 GB for models of 7 billion
parameters."""
_LOGITS = 4  # bytes of a logit
# bytes of logits, on a CPU and elsewhere; 4 MiB stay in its cache
_CHUNK = {True: 4 * 2**20, False: 256 * 2**20}
_CHUNK_COPIES = 2  # of a chunk's logits: probabilities, and half as much for their sums, or a mask
_FEW_ROWS = 64
_LEAST_COLUMNS = 256  # of a cache of fixed shape


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOnWorkers:
    """An engine, or one rank of it, on each of a role's workers."""

    size: ModelSize
    architecture: Architecture
    rollout: RolloutConfig
    dtype: Dtype
    longest: int
    """Tokens of the longest prompt and response."""
    memory: int = 0
    """Bytes of the accelerator; 0 where they are not known yet."""
    lora: LoraConfig | None = None
    """Adapters that it gets in place of weights; None: none."""

    @property
    def weights(self) -> int:
        """Bytes of the weights on one rank."""
        return -(-self.dtype.itemsize * self.size.total // self.rollout.tensor_parallel_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on one rank, which has at least one head."""
        one = self.architecture
        heads = -(-one.kv_heads // self.rollout.tensor_parallel_size)
        return 2 * one.layers * heads * one.head_dim * self.dtype.itemsize


Change = tuple[str, EngineOnWorkers]
"""A setting as it is written on a command line, ``rollout.max_rows=64``, and the engine with it."""


def changed_rollout(rollout: RolloutConfig, **options: Any) -> RolloutConfig | None:
    """Return the configuration with other options; None where it refuses them, as it does options
    of vLLM with an engine of the user's that has vLLM's memory.
    """
    try:
        return replace(rollout, **options)
    except ConfigError:
        return None


def rows_of_all_ranks(rollout: RolloutConfig) -> int:
    """Return ``max_rows`` for each worker of an engine."""
    return rollout.max_rows * rollout.tensor_parallel_size


def sampler_bytes(
    engine: EngineOnWorkers, rows: int, copies: int | None = None
) -> Mapping[str, int]:
    """Return the bytes of all ``rows``' logits in float32, and of drawing from them: ``copies`` of
    all logits, or None for those of TokenSampler, which takes a chunk at a time.
    """
    logits = _LOGITS * rows * engine.architecture.vocabulary
    if copies is not None:
        return {"sampler": logits * (1 + copies)}
    return {"sampler": logits + _CHUNK_COPIES * min(logits, sampler_chunk(on_cpu=False))}


def common_changes(engine: EngineOnWorkers) -> list[Change]:
    """Return the settings of any engine that need less memory: fewer rows, then bfloat16."""
    found = []
    if engine.rollout.max_rows > _FEW_ROWS:
        engine = replace(engine, rollout=replace(engine.rollout, max_rows=_FEW_ROWS))
        found.append((f"rollout.max_rows={_FEW_ROWS}", engine))
    if engine.dtype is Dtype.float32:
        engine = replace(engine, dtype=Dtype.bfloat16)
        found.append(("model.dtype=bfloat16", engine))
    return found


def sampler_chunk(*, on_cpu: bool) -> int:
    """Return the bytes of logits that tokens are drawn from at once."""
    return _CHUNK[on_cpu]


def cache_rows(rows: int) -> int:
    """Return the rows of the cache of fixed shape in which so many rows are decoded: a power of
    two.
    """
    return 1 << (rows - 1).bit_length()


def cache_columns(columns: int) -> int:
    """Return the columns of the cache of fixed shape for so many tokens of a row, of four sizes
    to a power of two.
    """
    if columns <= _LEAST_COLUMNS:
        return _LEAST_COLUMNS
    piece = 1 << (columns - 1).bit_length() - 3
    return -(-columns // piece) * piece
