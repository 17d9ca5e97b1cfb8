"""Translates ``rollout.*`` into the arguments of ``vllm.LLM``. Import ``process`` and prepare it
before this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import floor
from typing import Any

from vllm import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from siirl_dask.config import (
    Dtype,
    LoraConfig,
    ModelConfig,
    RolloutConfig,
    Sampler,
    changed_options,
    parse_bytes,
)
from siirl_dask.context import Device, DeviceKind
from siirl_dask.devices import traits_of
from siirl_dask.errors import ConfigError, did_you_mean
from siirl_dask.models.number_type import dtype_on
from siirl_dask.rollout.vllm_engine.adapter_choice import takes_layers
from siirl_dask.rollout.vllm_engine.adapter_layers import layer_arguments
from siirl_dask.rollout.vllm_engine.memory import CPU_CACHE
from siirl_dask.rollout.vllm_engine.other_logprobs import engine_length
from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks
from siirl_dask.rollout.vllm_engine.row_parameters import logprobs_mode
from siirl_dask.rollout.vllm_engine.token_choice import VllmTokenSampler

_LONGEST_THAT_FITS = -1
_HABIT = 0.9  # vLLM's default
# options of every engine that decide how vLLM is called
_SHARED = ("max_rows", "tensor_parallel_size")


def llm_arguments(
    model: ModelConfig,
    rollout: RolloutConfig,
    device: Device,
    ranks: EngineRanks,
    lora: LoraConfig | None = None,
    images: Mapping[str, Any] | None = None,
    agents: int = 1,
) -> dict[str, Any]:
    """Return all arguments but the model. ConfigError for ``engine_kwargs`` that are unknown or set
    here.

    ``lora`` describes the adapters that the engine will get for each of its ``agents``; None: none.
    ``images`` are the arguments for the images of a model that sees some.
    """
    on_cpu = device.kind is DeviceKind.CPU
    dtype = dtype_on(model.dtype, device.kind, device.index)
    cache = rollout.vllm.kv_cache_memory
    if not cache and on_cpu:
        cache = CPU_CACHE
    cache_bytes = _own_cache(device)
    if cache:
        cache_bytes = parse_bytes("rollout.vllm.kv_cache_memory", cache)
    ours = {
        "dtype": str(dtype),
        "skip_tokenizer_init": True,
        # the model's penalties and sampling must not reach our samples
        "generation_config": "vllm",
        "logits_processors": [VllmTokenSampler] if rollout.sampler is Sampler.exact else [],
        "logprobs_mode": logprobs_mode(rollout),
        "gpu_memory_utilization": _share(rollout, device),
        "kv_cache_memory_bytes": cache_bytes,
        "max_num_seqs": rollout.vllm.max_num_seqs or rollout.max_rows * ranks.size,
        "max_num_batched_tokens": rollout.vllm.max_num_batched_tokens,
        "enforce_eager": _eager(rollout, on_cpu=on_cpu),
        "enable_prefix_caching": rollout.vllm.enable_prefix_caching,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": bool(rollout.vllm.sleep_level) and not on_cpu,
        "tensor_parallel_size": ranks.size,
    }
    if model.float32_head:
        ours["hf_overrides"] = {"head_dtype": str(Dtype.float32)}
    if rollout.router_replay:
        # a request's places in the cache are looked up when it ends
        ours["async_scheduling"] = False
    if device.index or ranks.size > 1:
        ours["distributed_executor_backend"] = _executor(device.index, ranks)
    if ranks.size > 1:
        seconds = int(ranks.timeout.total_seconds())
        ours |= {"distributed_timeout_seconds": seconds, "cpu_distributed_timeout_seconds": seconds}
    ours |= images or {}
    valid = {field.name for field in fields(EngineArgs)}
    for name in rollout.vllm.engine_kwargs:
        if name in ours or name == "model":
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.{name}: another key sets it, see docs/engines.md"
            )
        if name not in valid:
            raise ConfigError(
                f"rollout.vllm.engine_kwargs.{name}: vLLM has no such "
                f"argument{did_you_mean(name, valid)}"
            )
    layers: dict[str, Any] = {}
    if lora is not None and takes_layers(dtype, rollout, lora, on_cpu=on_cpu):
        layers = layer_arguments(lora, agents)
    # A picture of the largest size goes through the tower for it, and on a CPU no memory is
    # measured.
    longest = engine_length(model)
    defaults: dict[str, Any] = {
        "max_model_len": _LONGEST_THAT_FITS if longest is None else longest,
        "skip_mm_profiling": on_cpu,
        # by default it prefers files of Mistral's library (consolidated*, params.json)
        "load_format": "hf",
        "config_format": "hf",
    }
    if not on_cpu and not ranks.see_all_devices:
        # vLLM's own kernel asks CUDA about the devices of all ranks in each rank's process
        defaults["disable_custom_all_reduce"] = True
    if on_cpu:
        # of latent attention, where it would take one for AMX, which takes no float32; of any other
        # it takes what it has
        defaults["attention_backend"] = AttentionBackendEnum.CPU_MLA
    return {
        **defaults,
        **layers,
        **ours,
        **rollout.vllm.engine_kwargs,
        **_own_options(rollout, device),
    }


def _own_options(rollout: RolloutConfig, device: Device) -> dict[str, Any]:
    """Return the options of vLLM's package for this kind of device, where it wants any.
    ConfigError for others.
    """
    needed = traits_of(device.kind).vllm_options
    given = rollout.vllm.engine_kwargs.get("additional_config", {})
    if wrong := [
        f"{name}={given[name]}" for name, value in needed.items() if given.get(name, value) != value
    ]:
        raise ConfigError(
            f"rollout.vllm.engine_kwargs.additional_config: {', '.join(wrong)}: new weights need "
            f"{dict(needed)}; leave it out"
        )
    return {"additional_config": {**given, **needed}} if needed else {}


def _eager(rollout: RolloutConfig, *, on_cpu: bool) -> bool:
    """Return whether vLLM runs without compiled graphs, of which a router tells nothing."""
    chosen = rollout.vllm.enforce_eager
    if chosen is not None:
        return chosen
    return bool(on_cpu or rollout.router_replay)


def _share(rollout: RolloutConfig, device: Device) -> float:
    """Return the share of the accelerator's memory that vLLM takes: what the plan leaves, or vLLM's
    habit where nothing is known of it.
    """
    share = rollout.vllm.gpu_memory_utilization
    if share is None and device.memory and device.room:
        return floor(device.room / device.memory * 1e4) / 1e4
    return (_HABIT if share is None else share) / device.shared_by


def _own_cache(device: Device) -> int | None:
    """Return the cache's bytes where workers share an accelerator, which vLLM must not measure
    while others take of it; None for what vLLM measures.
    """
    if device.shared_by <= 1 or not device.fill:
        return None
    return device.fill


def given_options(rollout: RolloutConfig, device: Device) -> str:
    """Return the options that differ from the defaults, by the names of the configuration, for
    error messages.
    """
    default = RolloutConfig()
    given = {name: getattr(rollout, name) for name in _SHARED}
    options = {
        f"rollout.{name}": value for name, value in given.items() if value != getattr(default, name)
    }
    options |= changed_options("rollout.vllm", rollout.vllm)
    if device.kind is DeviceKind.CPU:
        options = {"rollout.vllm.kv_cache_memory": CPU_CACHE, **options}
    if not options:
        return "its defaults"
    return ", ".join(f"{name}={value}" for name, value in options.items())


def _executor(index: int, ranks: EngineRanks) -> type[ExecutorWithExternalLauncher]:
    """Return an executor on device ``index`` that knows its rank.

    vLLM's own executor takes the first device that it sees, and reads its rank from the
    environment.
    """

    class InWorker(ExecutorWithExternalLauncher):  # type: ignore[misc]  # to mypy, vLLM's classes are Any
        def _distributed_args(self) -> tuple[str, int, int]:
            if ranks.size == 1:
                method, rank, _ = UniProcExecutor._distributed_args(self)
                return method, rank, index
            # Ranks that differ in this name speak over gloo on a CPU. Those with the same share
            # memory instead, and wait there in a loop that nothing ends when one of them dies.
            return f"file:///{ranks.name}-{ranks.rank}", ranks.rank, index

    return InWorker
