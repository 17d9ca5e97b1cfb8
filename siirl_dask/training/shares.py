"""Whether a role's workers, and the attention heads of its model, can be shared as its trainer says."""

from __future__ import annotations

from transformers import AutoConfig

from siirl_dask.config import TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.pretrained import refused_by_name


def check_workers(trainer: TrainerConfig, workers: int) -> None:
    """ConfigError unless shards, and tokens or layers that are shared, fill the workers of a role."""
    check_divides("trainer.shard_size", trainer.shard_size or workers, workers)
    check_divides("trainer.sequence_parallel", trainer.sequence_parallel, workers)
    check_divides("trainer.tensor_parallel", trainer.tensor_parallel, workers)


def check_divides(option: str, size: int, workers: int) -> None:
    if workers % size:
        raise ConfigError(f"{option}={size}: expected a divisor of the role's {workers} workers")


def check_heads(trainer: TrainerConfig, path: str) -> None:
    """ConfigError where workers cannot share the heads of the model in the folder ``path``."""
    tokens, tensors = trainer.sequence_parallel, trainer.tensor_parallel
    if tokens == tensors == 1:
        return
    with refused_by_name(path, f"model.path={path!r}"):
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
    if (heads := config.num_attention_heads) % tokens:
        raise ConfigError(f"trainer.sequence_parallel={tokens}: expected a divisor of the {heads} heads of {path!r}")
    for key in ("num_key_value_heads", "intermediate_size") if tensors > 1 else ():
        width = getattr(config, key, None)
        if not isinstance(width, int) or width % tensors:
            raise ConfigError(f"trainer.tensor_parallel={tensors}: expected a divisor of {key}={width} of {path!r}")
