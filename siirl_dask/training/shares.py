"""Whether a role's workers, and the attention heads of its model, can be shared as its trainer says."""

from __future__ import annotations

from siirl_dask.config import TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.parameters import read_widths


def check_workers(trainer: TrainerConfig, workers: int) -> None:
    """ConfigError unless shards, and tokens or layers that are shared, fill the workers of a role."""
    check_divides("trainer.shard_size", trainer.shard_size or workers, workers)
    check_divides("trainer.sequence_parallel", trainer.sequence_parallel, workers)
    check_divides("trainer.tensor_parallel", trainer.tensor_parallel, workers)


def check_divides(option: str, size: int, workers: int) -> None:
    if workers % size:
        raise ConfigError(f"{option}={size}: expected a divisor of the role's {workers} workers")


def check_heads(trainer: TrainerConfig, path: str) -> None:
    """ConfigError where workers cannot share the heads of the model in the folder ``path``, as far as it is there."""
    tokens, tensors = trainer.sequence_parallel, trainer.tensor_parallel
    if tokens == tensors == 1 or (widths := read_widths(path)) is None:
        return
    if tokens > 1 and (widths.heads is None or widths.heads % tokens):
        raise ConfigError(
            f"trainer.sequence_parallel={tokens}: expected a divisor of the {widths.heads} heads of {path!r}"
        )
    shared = {"num_key_value_heads": widths.kv_heads, "intermediate_size": widths.intermediate}
    for key, width in shared.items() if tensors > 1 else ():
        if width is None or width % tensors:
            raise ConfigError(f"trainer.tensor_parallel={tensors}: expected a divisor of {key}={width} of {path!r}")
