"""Checks before anything starts that a role's workers fit what its model is divided into, and
have its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib.util import find_spec

from siirl_dask.config import Config, DevicePreference, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.devices import DeviceKind, traits_of
from siirl_dask.devices.operators import AUTO, LIBRARIES, check_backend_operators, choose_operators
from siirl_dask.errors import ConfigError, counted
from siirl_dask.models.architecture import read_config
from siirl_dask.models.planned_models import check_model, why_padded
from siirl_dask.models.shapes import read_widths
from siirl_dask.training.specs import TRAINER_KEYS, TRAINERS, TrainerSpec, trainer_spec


def check_layout(trainer: TrainerConfig, model: ModelConfig, workers: int) -> None:
    """Check that the backend reads the options of ``trainer``, that its layout fits the role's
    workers and the model, and that the model is one that it can load.

    ConfigError if not. A model that is not on this machine is checked by the workers when they
    build the role.
    """
    spec = trainer_spec(trainer.backend)
    if trainer.backend in TRAINERS:
        # their options are checked where the configuration is made
        check_model(model.path)
    else:
        _check_read(trainer, spec)
    spec.check(trainer, model, workers)


def _check_read(trainer: TrainerConfig, spec: TrainerSpec) -> None:
    default = TrainerConfig()
    for key in sorted(TRAINER_KEYS - spec.reads):
        for option, value in _changed(
            f"trainer.{key}", getattr(trainer, key), getattr(default, key)
        ):
            raise ConfigError(
                f"{option}={value!r} with trainer.backend={trainer.backend}: {spec.name} does not "
                f"read it (it reads: {', '.join(sorted(spec.reads))}); leave it out"
            )


def _changed(key: str, value: object, default: object) -> Iterator[tuple[str, object]]:
    """Yield ``key``, or the keys in its group, whose value is not the default one, with their
    values.
    """
    if value == default:
        return
    if is_dataclass(value):
        for one in fields(value):
            yield from _changed(
                f"{key}.{one.name}", getattr(value, one.name), getattr(default, one.name)
            )
    else:
        yield key, value


def check_liger(trainer: TrainerConfig, config: Config) -> None:
    """Check that workers can run Liger's kernels, as far as that is known here. ConfigError if they
    cannot.

    Devices of other machines, and those that ``cluster.device_memory`` speaks of, are checked by
    the workers.
    """
    if trainer.liger is not True:
        return
    if find_spec("liger_kernel") is None:
        raise ConfigError("trainer.liger=true needs liger-kernel: pip install 'siirl_dask[liger]'")
    cluster = config.cluster
    if cluster.device is DevicePreference.cpu:
        raise ConfigError(
            f"trainer.liger=true: Liger's kernels need a GPU, and cluster.device={cluster.device}: "
            "leave one out"
        )
    if not (cluster.exists or cluster.spec or cluster.device_memory):
        from siirl_dask.devices.accelerator import visible_devices  # and with it torch: seconds

        if not traits_of(visible_devices().kind).runs_triton:
            raise ConfigError(
                "trainer.liger=true: Liger's kernels need a GPU, and torch sees none on this "
                "machine: leave it out (to plan for GPUs, say cluster.device_memory=80GB)"
            )


def operators_of(trainer: TrainerConfig, kind: str) -> dict[str, str]:
    """Return the library of each fused operator on a kind of device; ``auto`` where a trial on
    it chooses.
    """
    liger = trainer.liger
    if liger == AUTO and (trainer.compile or trainer.fsdp.tensor_parallel > 1):
        liger = False  # the compiler fuses these layers itself, and parts of a layer are DTensors
    libraries = trainer_spec(trainer.backend).operators
    return choose_operators(trainer.operators, kind, liger=liger, libraries=libraries)


def check_libraries(trainer: TrainerConfig, config: Config) -> None:
    """Check that the backend has the libraries of ``trainer.operators``, and that workers can run
    them, as far as that is known here. ConfigError if not.
    """
    check_backend_operators(
        trainer.operators, trainer_spec(trainer.backend).operators, trainer.backend
    )
    for operator, name in trainer.operators.items():
        library = LIBRARIES[name]
        given = f"trainer.operators.{operator}={name}"
        if not any(map(find_spec, library.packages)):
            raise ConfigError(
                f"{given} needs {' or '.join(library.packages)}: {library.cure}, or leave it out"
            )
        cluster = config.cluster
        if library.kind is None or cluster.exists or cluster.spec or cluster.device_memory:
            continue
        from siirl_dask.devices.accelerator import visible_devices  # and with it torch: seconds

        there = DeviceKind.CPU if cluster.device is DevicePreference.cpu else visible_devices().kind
        if there is not library.kind:
            raise ConfigError(
                f"{given} runs on {library.kind} alone, and workers here have {there}: leave it out"
            )


def check_replay(trainer: TrainerConfig, rollout: RolloutConfig) -> None:
    """Check that a policy can replay routes, if ``rollout.router_replay`` asks for it.
    ConfigError if it cannot.
    """
    if rollout.router_replay and not trainer_spec(trainer.backend).replays_routes:
        raise ConfigError(
            f"rollout.router_replay=true with trainer.backend={trainer.backend}: it replays no "
            "routes; leave one of them out"
        )
    sequence = trainer.fsdp.sequence_parallel
    refused = {
        f"trainer.fsdp.sequence_parallel={sequence}": sequence > 1,
        f"trainer.fsdp.tensor_parallel={trainer.fsdp.tensor_parallel}": trainer.fsdp.tensor_parallel
        > 1,
        "trainer.compile=true": trainer.compile,
    }
    for option, given in refused.items():
        if given and rollout.router_replay:
            raise ConfigError(
                f"rollout.router_replay=true with {option}: with trainer.backend=torch and fsdp "
                "routes are replayed by "
                "each rank of its own rows, uncompiled; leave one of them out"
            )


def check_workers(trainer: TrainerConfig, workers: int) -> None:
    """Check that the sizes of FSDP, sequence and tensor parallelism divide a role's workers.
    ConfigError if not.
    """
    check_divides("trainer.fsdp.shard_size", trainer.fsdp.shard_size or workers, workers)
    check_divides("trainer.fsdp.sequence_parallel", trainer.fsdp.sequence_parallel, workers)
    check_divides("trainer.fsdp.tensor_parallel", trainer.fsdp.tensor_parallel, workers)


def check_divides(option: str, size: int, workers: int) -> None:
    """Check that ``size``, the value of ``option``, divides a role's ``workers``. ConfigError if
    not.
    """
    if workers % size:
        raise ConfigError(
            f"{option}={size}: expected a divisor of the role's {counted(workers, 'worker')}"
        )


def check_all_attend(path: str, size: int, option: str) -> None:
    """Check that a model that is to be divided packs its rows, and has layers of attention alone,
    by its config. ConfigError if not.
    """
    padded = why_padded(path)
    if padded is not None:
        raise ConfigError(
            f"trainer.fsdp.{option}={size}: the rows of {path!r} are computed with padding "
            f"({padded}) and are not divided; leave it out"
        )
    config = read_config(path)
    if config is None:
        return
    kinds = config.get("text_config", config).get("layer_types")
    if not kinds:
        return
    others = sorted(
        {
            str(kind)
            for kind in kinds
            if not str(kind).endswith("attention") or kind == "linear_attention"
        }
    )
    if others:
        raise ConfigError(
            f"trainer.fsdp.{option}={size}: {path!r} has layers of the kind {', '.join(others)}, "
            "which carry a state along a row and are not divided; leave it out"
        )


def check_heads(trainer: TrainerConfig, path: str) -> None:
    """Check that workers can divide the heads of the model in ``path``, if that is here.
    ConfigError if they cannot.
    """
    sequence = trainer.fsdp.sequence_parallel
    tensor = trainer.fsdp.tensor_parallel
    if sequence == tensor == 1:
        return
    key = "tensor_parallel"
    if sequence > 1:
        key = "sequence_parallel"
    check_all_attend(path, max(sequence, tensor), key)
    widths = read_widths(path)
    if widths is None:
        return
    if sequence > 1 and (widths.heads is None or widths.heads % sequence):
        raise ConfigError(
            f"trainer.fsdp.sequence_parallel={sequence}: expected a divisor of the {widths.heads} "
            f"heads of {path!r}"
        )
    if tensor > 1 and widths.experts:
        raise ConfigError(
            f"trainer.fsdp.tensor_parallel={tensor}: {path!r} is a mixture of {widths.experts} "
            "experts, which are not "
            "split rightly; leave it out (trainer.backend=fsdp shards experts over all workers)"
        )
    divided = {"num_key_value_heads": widths.kv_heads, "intermediate_size": widths.intermediate}
    for key, width in divided.items() if tensor > 1 else ():
        if width is None or width % tensor:
            raise ConfigError(
                f"trainer.fsdp.tensor_parallel={tensor}: expected a divisor of {key}={width} of "
                f"{path!r}"
            )
