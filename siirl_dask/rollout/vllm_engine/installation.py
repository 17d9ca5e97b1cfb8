"""Looks for vLLM in this process without importing it, and has the environment that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from packaging.version import Version

from siirl_dask.config import RolloutConfig, Sampler, changed_options
from siirl_dask.devices import DeviceKind, traits_of
from siirl_dask.errors import ConfigError

ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # a Dask worker is a daemon, which may have no processes of its own
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # the other one does not take vllm_sampler's kind of processor
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        # a warning about NUMA nodes from each worker; read when torch is imported
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
)
"""Environment variables, best set before the process starts; a value that is set stays, but for
the first two."""


def is_installed() -> bool:
    """Return whether vLLM is installed."""
    return find_spec("vllm") is not None


def check_installed() -> None:
    """Raise ConfigError where vLLM is not installed, or not together with the plug-in of its own
    release.
    """
    if not is_installed():
        raise ConfigError(
            "rollout.engine=vllm: vLLM is not installed; install the extra cpu or gpu, as in pip "
            "install 'siirl_dask[cpu]', on NPUs as docs/engines.md#vllm-on-npus says, or take "
            "rollout.engine=transformers"
        )
    _check_plugins()


def check_passed_over(rollout: RolloutConfig) -> None:
    """Raise ConfigError for an option that only vLLM reads, where ``auto`` falls back to another
    engine.
    """
    options: dict[str, Any] = changed_options("rollout.vllm", rollout.vllm)
    if rollout.tensor_parallel_size > 1:
        options["rollout.tensor_parallel_size"] = rollout.tensor_parallel_size
    if rollout.sampler is Sampler.vllm:
        options["rollout.sampler"] = rollout.sampler
    if not options:
        return
    shown = ", ".join(f"{name}={value}" for name, value in options.items())
    raise ConfigError(
        f"{shown}: only vLLM reads this, and rollout.engine=auto takes transformers: vLLM is not "
        "installed here; take rollout.engine=vllm if the workers have it, or leave this out"
    )


def _check_plugins() -> None:
    """Raise ConfigError unless a package that adds a kind of device to vLLM is of vLLM's own
    release.
    """
    vllm = _release("vllm")
    for name in (traits.vllm for traits in map(traits_of, DeviceKind) if traits.plugin is not None):
        plugin = _release(name)
        if vllm is not None and plugin is not None and vllm.release != plugin.release:
            raise ConfigError(
                f"rollout.engine: vllm {vllm} and {name} {plugin} do not go together: install "
                f"{name}'s release of "
                "vLLM, as docs/engines.md#vllm-on-npus says, or take rollout.engine=transformers"
            )


def _release(package: str) -> Version | None:
    try:
        return Version(version(package))
    except PackageNotFoundError:
        return None
