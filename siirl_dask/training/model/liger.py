"""Liger's Triton kernels (arXiv:2410.10989) for norms and feed-forward layers: one pass over memory, not several.

They go into the modules of one model. Liger's own functions change transformers' classes, and so every model that other
roles of the process build later.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from siirl_dask.devices import traits_of
from siirl_dask.errors import ConfigError

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")
_SILU = ("SiLU", "SiLUActivation")  # torch's, and transformers'


def use_liger(
    modules: Iterable[nn.Module], device: torch.device, operators: Container[str] = ("rms_norm", "swiglu")
) -> None:
    """Let Llama-like norms and feed-forward layers compute with Liger's kernels, those of ``operators``.

    ConfigError where they cannot run, and for a model that has neither. Other modules, such as Gemma's norms, stay.
    """
    if not traits_of(device.type).runs_triton:
        raise ConfigError(f"trainer.liger=true: Liger's kernels are Triton's and need a GPU; this worker has {device}")
    rms_norm, swiglu = _kernels()
    changed = 0
    for module in modules:
        if "rms_norm" in operators and is_norm(module):
            module.forward = partial(_norm, module, rms_norm)
            changed += 1
        elif "swiglu" in operators and is_feed_forward(module):
            module.forward = partial(_feed_forward, module, swiglu)
            changed += 1
    if not changed:
        raise ConfigError("trainer.liger=true: the model has no norm and no feed-forward layer like Llama's")


def _kernels() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    try:
        found = importlib.import_module("liger_kernel.transformers.functional")
        return found.liger_rms_norm, found.liger_swiglu
    except Exception as error:  # it is not there; it does not fit triton, or triton does not fit the device
        raise ConfigError(
            f"trainer.liger=true: liger-kernel cannot be imported: {type(error).__name__}: {error}; "
            "pip install 'siirl_dask[liger]', or leave it out"
        ) from error


def is_norm(module: nn.Module) -> bool:
    """Return whether it computes ``weight * x / rms(x)``; norms with another formula have no ``variance_epsilon``."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def is_feed_forward(module: nn.Module) -> bool:
    """Return whether it computes ``down(silu(gate(x)) * up(x))``."""
    has_all = all(hasattr(module, name) for name in _PROJECTIONS)
    return has_all and type(module.act_fn).__name__ in _SILU


def _norm(module: Any, kernel: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    # in_place: the backward pass would write over the gradient that it gets, which the residual stream may share
    return kernel(hidden, module.weight, module.variance_epsilon, in_place=False)


def _feed_forward(module: Any, kernel: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    output: Tensor = module.down_proj(kernel(module.gate_proj(hidden), module.up_proj(hidden)))
    return output
