"""Translates ``rollout.*`` into the arguments of ``sglang.Engine``, which are SGLang's server
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import floor
from typing import Any

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, SglangConfig, changed_options
from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import ConfigError
from siirl_dask.models.number_type import dtype_on
from siirl_dask.rollout.sglang_engine.process import WRITTEN_FOR, release
from siirl_dask.rollout.specs import alternatives

TOKENS_PER_REPORT = 16
"""SGLang tells of a response each time that it has this many more tokens."""
_FOR_CPUS = ("intel_amx", "torch_native")  # SGLang's kernels of attention there
_WITH_FLOAT32 = "triton"  # flash attention knows no float32
_REFUSED: Mapping[str, str] = {
    "allow_auto_truncate": "it cuts prompts and responses without a word",
    "incremental_streaming_output": "a response is read from its last report, which must be whole",
    "preferred_sampling_params": "requests have their own",
    "rl_on_policy_target": "it rounds log-probs to bfloat16",
    "server_args": "give its parts",
    "speculative_algorithm": "its tokens are drawn in another way",
}
_SIZES = ("dp_size", "ep_size", "nnodes", "node_rank", "pp_size")


def server_arguments(
    model: ModelConfig,
    rollout: RolloutConfig,
    device: Device,
    deterministic: Collection[str],
) -> dict[str, Any]:
    """Return all arguments of ``sglang.Engine``. ConfigError for ``engine_kwargs`` that are set
    here or not taken.

    ``deterministic`` names the kernels of attention that are, in the SGLang that is installed.
    """
    own = rollout.sglang
    dtype = dtype_on(model.dtype, device.kind, device.index)
    on_cpu = device.kind is DeviceKind.CPU
    ours: dict[str, Any] = {
        "model_path": model.path,
        "dtype": str(dtype),
        "device": str(device.kind),
        "base_gpu_id": device.index,
        "tp_size": 1,
        "skip_tokenizer_init": True,
        "enable_deterministic_inference": True,  # seeds count with it alone
        "attention_backend": _attention(dtype, own, deterministic, on_cpu=on_cpu),
        "disable_radix_cache": own.disable_radix_cache,
        "max_running_requests": rollout.max_rows,
        "mem_fraction_static": _share(own, device),
        "enable_memory_saver": own.sleep and not on_cpu,
        "stream_interval": TOKENS_PER_REPORT,
        "random_seed": 0,  # rows have seeds of their own; without one SGLang draws it
    }
    if model.float32_head:
        ours["enable_fp32_lm_head"] = True
    _check_own(own.engine_kwargs, ours)
    return {"log_level": "error", **ours, **own.engine_kwargs}


def given_options(rollout: RolloutConfig) -> str:
    """Return the options that differ from the defaults, by the names of the configuration, for
    error messages.
    """
    options = {
        "rollout.max_rows": rollout.max_rows,
        **changed_options("rollout.sglang", rollout.sglang),
    }
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _check_own(given: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    for name in given:
        if name in ours:
            raise ConfigError(
                f"rollout.sglang.engine_kwargs.{name}: another key sets it, see docs/engines.md"
            )
        if name in _SIZES:
            raise ConfigError(
                f"rollout.sglang.engine_kwargs.{name}: an SGLang engine is on one worker here"
            )
        if name in _REFUSED:
            raise ConfigError(
                f"rollout.sglang.engine_kwargs.{name}: {_REFUSED[name]}; leave it out"
            )


def _attention(
    dtype: Dtype,
    own: SglangConfig,
    deterministic: Collection[str],
    *,
    on_cpu: bool,
) -> str | None:
    """Return the kernels of attention; None for SGLang's choice. ConfigError where none that it has
    are deterministic.
    """
    if own.attention_backend is not None and own.attention_backend not in deterministic:
        raise ConfigError(
            f"rollout.sglang.attention_backend={own.attention_backend!r}: expected one that is "
            f"deterministic in SGLang {release()}: {', '.join(sorted(deterministic))}"
        )
    if own.attention_backend is not None:
        return own.attention_backend
    if not on_cpu:
        return _WITH_FLOAT32 if dtype is Dtype.float32 else None
    if found := next((name for name in _FOR_CPUS if name in deterministic), None):
        return found
    raise ConfigError(
        f"rollout.engine=sglang: SGLang {release()} has no deterministic attention for a CPU (nor "
        f"had {WRITTEN_FOR}), without which rows have no seeds; take {alternatives('sglang')} there"
    )


def _share(own: SglangConfig, device: Device) -> float | None:
    """Return the share of the accelerator's memory that SGLang takes: what the plan leaves, or
    None for its habit.
    """
    if own.mem_fraction_static is not None:
        return own.mem_fraction_static / device.shared_by
    return floor(device.room / device.memory * 1e4) / 1e4 if device.memory and device.room else None
