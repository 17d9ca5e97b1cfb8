"""Preflight of policies, references, critics and reward models: layouts, adapters, and each worker's memory.

A model that learns takes 16 bytes per parameter (weights, gradients and AdamW's two moments in float32), and 4 more
with a moving average of the weights. A reference takes 4. With adapters the model takes 4 and the adapters learn. With
``trainer.backend=fsdp`` a worker holds its shard of that, plus the layers that are gathered at one time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from siirl_dask.config import Backend, Config, DevicePreference, Dtype, ModelConfig, TrainerConfig, parse_bytes
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_architecture
from siirl_dask.models.shapes import ModelSize, count_parameters, parameter_shapes, read_widths
from siirl_dask.planner import Footprint, RoleCost
from siirl_dask.training.memory import ModelOnWorkers, passing_bytes
from siirl_dask.training.remedies import with_remedies

_LEARNS, _SCORES, _AVERAGE = 16, 4, 4  # bytes per parameter
_GRADIENT = 4  # part of _LEARNS that no checkpoint has
_ENDS = 2 * 4  # bytes per element of the largest parameter: embeddings and head
_IN_DTYPE = {Dtype.float32: 4, Dtype.bfloat16: 2}
_IN_A_LAYER = re.compile(r"(?:.+\.)?layers\.\d+\.(?:.+\.)?(\w+)\.weight")


def check_trainer(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_trainer``. ConfigError for an impossible layout or impossible adapters."""
    return _check_learner(options, workers, config, options.get("trainer", config.trainer), "trainer")


def check_critic(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_critic``. ConfigError for an impossible layout or impossible adapters."""
    return _check_learner(options, workers, config, options.get("trainer", config.critic), "critic")


def check_reference(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Check and size a role of ``build_reference``. ConfigError for an impossible layout."""
    model, trainer = options.get("model", config.model), options.get("trainer", config.trainer)
    _check_layout(trainer, model, len(workers))
    _check_liger(trainer, config)
    size = count_parameters(model.path)
    if size is None:
        return RoleCost(reads=(model.path,))
    held = _share(_SCORES * _parameters(size, trainer), trainer, len(workers))
    computing, device = _passes(size, model, trainer, len(workers), config, "trainer", learns=False)
    memory = held + _gathered(size, trainer, learns=False)
    return RoleCost(memory=memory, computing=computing, device=device, reads=(model.path,))


def trainer_groups(options: Mapping[str, Any], workers: int) -> dict[str, int]:
    """Return the sizes of the groups in which the ranks of a trained model speak with each other, by config key."""
    trainer: TrainerConfig = options["trainer"]
    if trainer.backend is not Backend.fsdp:
        return {}
    fsdp = trainer.fsdp
    sharded = {"trainer.fsdp.shard_size": fsdp.shard_size or workers} if fsdp.tensor_parallel == 1 else {}
    return sharded | {
        "trainer.fsdp.sequence_parallel": fsdp.sequence_parallel,
        "trainer.fsdp.tensor_parallel": fsdp.tensor_parallel,
    }


def check_reward_model(options: Mapping[str, Any], workers: Sequence[str], config: Config) -> RoleCost:
    """Size a role of ``build_reward_model``."""
    model: ModelConfig = options.get("model", config.model)
    size = count_parameters(model.path)
    if size is None:
        return RoleCost(reads=(model.path,))
    weights = _IN_DTYPE[model.dtype] * size.total
    return RoleCost(memory=weights, device=Footprint(held={"weights": weights}, loading=weights), reads=(model.path,))


def _check_learner(
    options: Mapping[str, Any], workers: Sequence[str], config: Config, trainer: TrainerConfig, key: str
) -> RoleCost:
    model: ModelConfig = options.get("model", config.model)
    _check_layout(trainer, model, len(workers))
    if trainer.lora.rank and find_spec("peft") is None:
        raise ConfigError(f"trainer.lora.rank={trainer.lora.rank} needs peft: pip install 'siirl_dask[lora]'")
    _check_liger(trainer, config)
    adapters = count_adapters(model.path, trainer) if trainer.lora.rank else None
    provides = frozenset({"adapters"} if trainer.lora.rank else ())
    size = count_parameters(model.path)
    if size is None:
        return RoleCost(provides=provides, reads=(model.path,))
    each = _LEARNS + (_AVERAGE if trainer.ema_decay else 0)
    whole = _parameters(size, trainer)
    held = each * whole if adapters is None else _SCORES * whole + each * adapters.total
    copied = 0
    if config.checkpoint.every and config.checkpoint.asynchronous:
        learned = whole if adapters is None else adapters.total
        copied = _share((each - _GRADIENT) * learned, trainer, len(workers))
    memory = _share(held, trainer, len(workers)) + _gathered(size, trainer, learns=True)
    computing, device = _passes(size, model, trainer, len(workers), config, key)
    return RoleCost(
        memory=memory,
        computing=computing,
        device=device,
        checkpoint_copy=copied,
        provides=provides,
        reads=(model.path,),
    )


def _passes(
    size: ModelSize,
    model: ModelConfig,
    trainer: TrainerConfig,
    workers: int,
    config: Config,
    key: str,
    *,
    learns: bool = True,
) -> tuple[int, Footprint | None]:
    """Return the bytes of a pass on a CPU, without gathered layers and their gradients, and the memory on a device.

    0 and None for an architecture that is not known.
    """
    architecture = read_architecture(model.path)
    if architecture is None:
        return 0, None
    longest = config.data.max_prompt_length + config.rollout.max_response_length
    rows = config.data.batch_size * config.rollout.rows_per_prompt
    if learns:
        rows = -(-rows // config.algorithm.minibatches)
    most = -(-rows // workers) * longest

    def tokens(trainer: TrainerConfig) -> int:
        row = -(-longest // trainer.fsdp.sequence_parallel)  # whose ranks share the tokens of a row
        rows = max(most * trainer.fsdp.tensor_parallel, row)  # whose ranks all compute the rows of each
        return min(max(trainer.max_tokens_per_micro_batch, row), rows)

    def adapters(trainer: TrainerConfig) -> int:
        found = count_adapters(model.path, trainer)
        return 0 if found is None else found.total

    on_workers = ModelOnWorkers(
        size=size,
        architecture=architecture,
        trainer=trainer,
        dtype=model.dtype,
        ranks=workers,
        tokens=tokens(trainer),
        adapters=adapters(trainer) if learns and trainer.lora.rank else 0,
        learns=learns,
        scores=key != "critic",
    )
    return passing_bytes(on_workers), with_remedies(on_workers, key, tokens, adapters)


def count_adapters(path: str, trainer: TrainerConfig) -> ModelSize | None:
    """Return the size of the adapters for the weights in ``path``; None when there are no weights there. ConfigError
    when one of ``trainer.lora.targets`` names no layer.
    """
    from siirl_dask.training.model.lora import chosen_targets  # imports torch, which only adapters need here

    shapes = parameter_shapes(path)
    linear: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if len(shape) == 2 and (layer := _IN_A_LAYER.fullmatch(name)):
            linear.setdefault(layer[1], []).append(shape)
    if not shapes:
        return None
    chosen = [shape for target in chosen_targets(trainer, set(linear)) for shape in linear[target]]
    sizes = [trainer.lora.rank * side for shape in chosen for side in shape]
    return ModelSize(sum(sizes), len(sizes), max(sizes, default=0))


def _check_layout(trainer: TrainerConfig, model: ModelConfig, workers: int) -> None:
    """Check that shards, sequence and tensor parallelism fit the role's workers and the model's heads.

    ConfigError if they do not. A model that is not on this machine is checked by the workers when they build the role.
    """
    if trainer.backend is not Backend.torch:
        check_workers(trainer, workers)
        check_heads(trainer, model.path)


def _check_liger(trainer: TrainerConfig, config: Config) -> None:
    """Check that workers can run Liger's kernels, as far as that is known here. ConfigError if they cannot.

    Devices of other machines, and those that ``cluster.device_memory`` speaks of, are checked by the workers.
    """
    if not trainer.liger:
        return
    if find_spec("liger_kernel") is None:
        raise ConfigError("trainer.liger=true needs liger-kernel: pip install 'siirl_dask[liger]'")
    cluster = config.cluster
    if cluster.device is DevicePreference.cpu:
        raise ConfigError(
            f"trainer.liger=true: Liger's kernels need a GPU, and cluster.device={cluster.device}: leave one out"
        )
    if not (cluster.exists or cluster.spec or cluster.device_memory):
        import torch  # seconds, for which nobody else waits

        if not torch.cuda.is_available():
            raise ConfigError(
                "trainer.liger=true: Liger's kernels need a GPU, and torch sees none on this machine: leave it out "
                "(to plan for GPUs, say cluster.device_memory=80GB)"
            )


def check_workers(trainer: TrainerConfig, workers: int) -> None:
    """Check that the sizes of FSDP, sequence and tensor parallelism divide a role's workers. ConfigError if not."""
    check_divides("trainer.fsdp.shard_size", trainer.fsdp.shard_size or workers, workers)
    check_divides("trainer.fsdp.sequence_parallel", trainer.fsdp.sequence_parallel, workers)
    check_divides("trainer.fsdp.tensor_parallel", trainer.fsdp.tensor_parallel, workers)


def check_divides(option: str, size: int, workers: int) -> None:
    """Check that ``size``, the value of ``option``, divides a role's ``workers``. ConfigError if not."""
    if workers % size:
        raise ConfigError(f"{option}={size}: expected a divisor of the role's {workers} workers")


def check_heads(trainer: TrainerConfig, path: str) -> None:
    """Check that workers can divide the heads of the model in ``path``, if that is here. ConfigError if they cannot."""
    sequence, tensor = trainer.fsdp.sequence_parallel, trainer.fsdp.tensor_parallel
    if sequence == tensor == 1 or (widths := read_widths(path)) is None:
        return
    if sequence > 1 and (widths.heads is None or widths.heads % sequence):
        raise ConfigError(
            f"trainer.fsdp.sequence_parallel={sequence}: expected a divisor of the {widths.heads} heads of {path!r}"
        )
    divided = {"num_key_value_heads": widths.kv_heads, "intermediate_size": widths.intermediate}
    for key, width in divided.items() if tensor > 1 else ():
        if width is None or width % tensor:
            raise ConfigError(f"trainer.fsdp.tensor_parallel={tensor}: expected a divisor of {key}={width} of {path!r}")


def _parameters(size: ModelSize, trainer: TrainerConfig) -> int:
    """Count the parameters of one replica: each tensor-parallel rank has the embeddings of both ends in full."""
    return size.total + 2 * (trainer.fsdp.tensor_parallel - 1) * size.largest


def _share(total: int, trainer: TrainerConfig, workers: int) -> int:
    """Return one worker's part of ``total`` bytes: all of them, or with fsdp its shard."""
    return total if trainer.backend is Backend.torch else -(-total // (trainer.fsdp.shard_size or workers))


def _gathered(size: ModelSize, trainer: TrainerConfig, *, learns: bool) -> int:
    """Return the bytes that fsdp holds gathered at once: the embeddings of both ends and one group of layers, and if
    the model learns as much for their gradients.
    """
    if trainer.backend is not Backend.fsdp:
        return 0
    # layers join a group until it has gather_size, so the last one may exceed it
    unit = parse_bytes("trainer.fsdp.gather_size", trainer.fsdp.gather_size) + 4 * size.layer
    return (2 if learns else 1) * (_ENDS * size.largest + min(unit, 4 * size.total))
