"""Liger's Triton kernels (arXiv:2410.10989) for norms and feed-forward layers: one pass over
memory, not several.

They go into the modules of one model. Liger's own functions change transformers' classes, and so
every model that other roles of the process build later.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Container, Iterable, Mapping
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from siirl_dask.devices import traits_of
from siirl_dask.devices.operators import AUTO, LIGER, OPERATORS, TORCH
from siirl_dask.errors import ConfigError, clause
from siirl_dask.training.model.trial import rounding

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "act_fn")
_SILU = ("SiLU", "SiLUActivation")  # torch's, and transformers'
_TOKENS = 3  # of a trial
_EPSILON = 1e-6
Kernels = tuple[Callable[..., Tensor], Callable[..., Tensor]]
"""Liger's norm and its product of gate and up."""
logger = logging.getLogger("siirl_dask.training")


def settle(
    operators: Mapping[str, str], modules: Iterable[nn.Module], device: torch.device
) -> dict[str, str]:
    """Return the operators with liger or torch for norms and feed-forward layers that are ``auto``:
    liger where its kernels learn as torch does on the device, in layers of the model's widths. The
    log says, once, why it does not.

    Each rank tries by itself, with tensors of its own, so that one that fails leaves no other
    waiting.
    """
    open_ones = [
        name for name, library in operators.items() if library == AUTO and LIGER in OPERATORS[name]
    ]
    if not open_ones:
        return {**operators}
    reason = _why_not(*_widths(modules), device)
    if reason is not None:
        _say(f"norms and feed-forward layers on {device} are computed by torch: {reason}")
    return {**operators, **dict.fromkeys(open_ones, LIGER if reason is None else TORCH)}


@cache
def _say(text: str) -> None:
    logger.info(text)


def _widths(modules: Iterable[Any]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the widths of a model's norms and of its feed-forward layers, those that Liger's
    kernels can take over.
    """
    norms = set[int]()
    inner = set[int]()
    for module in modules:
        if is_norm(module):
            norms.add(module.weight.shape[-1])
        elif is_feed_forward(module):
            inner.add(module.gate_proj.out_features)
    return frozenset(norms), frozenset(inner)


def _why_not(norms: frozenset[int], inner: frozenset[int], device: torch.device) -> str | None:
    """Return why Liger's kernels do not compute what torch does, values and gradients; None
    where they do.
    """
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed (pip install 'siirl_dask[liger]')"
    if not norms and not inner:
        return "the model has no norm and no feed-forward layer like Llama's"
    try:
        rms_norm, swiglu = _kernels()
        for dtype in (torch.float32, torch.bfloat16):
            for width in sorted(norms):
                hidden = _values((_TOKENS, width), dtype, device)
                weight = _values((width,), dtype, device)
                _compare(partial(_liger_norm, rms_norm), _torch_norm, [hidden, weight])
            for width in sorted(inner):
                gate = _values((_TOKENS, width), dtype, device)
                up = _values((_TOKENS, width), dtype, device)
                _compare(swiglu, _torch_swiglu, [gate, up])
    except Exception as error:
        # Triton's, CUDA's and the import's: no program for this device, another version, ...
        return (
            f"liger-kernel does not run: {type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}"
        )
    return None


def _values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers from -2 to 2, the same in every process and without drawing any."""
    count = math.prod(shape)
    return (
        (4 * torch.arange(count, device=device).mul(0.618).frac() - 2)
        .view(shape)
        .to(dtype)
        .requires_grad_()
    )


def _compare(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Raise AssertionError where a kernel's values or gradients are not those of its reference."""
    outputs = []
    with torch.enable_grad():
        for function in (kernel, reference):
            value = function(*inputs)
            outputs.append([value, *torch.autograd.grad(value.float().square().sum(), inputs)])
    kernel_outputs, reference_outputs = outputs
    for found, expected in zip(kernel_outputs, reference_outputs, strict=True):
        largest = expected.float().abs().max().item()
        error = (found.float() - expected.float()).abs().max().item()
        if not error <= rounding(largest, expected.dtype):  # also for NaN
            raise AssertionError(
                f"its numbers are off by {error:.2g} of {largest:.2g} in {expected.dtype}"
            )


def _liger_norm(kernel: Callable[..., Tensor], hidden: Tensor, weight: Tensor) -> Tensor:
    return kernel(hidden, weight, _EPSILON, in_place=False)


def _torch_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)).to(
        hidden.dtype
    )


def _torch_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def use_liger(
    modules: Iterable[nn.Module],
    device: torch.device,
    operators: Container[str] = ("rms_norm", "swiglu"),
) -> None:
    """Let Llama-like norms and feed-forward layers compute with Liger's kernels, those of
    ``operators``.

    ConfigError where they cannot run, and for a model that has neither. Other modules, such as
    Gemma's norms, stay.
    """
    if not traits_of(device.type).runs_triton:
        raise ConfigError(
            "trainer.liger=true: Liger's kernels are Triton's and need a GPU; this worker has "
            f"{device}"
        )
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
        raise ConfigError(
            "trainer.liger=true: the model has no norm and no feed-forward layer like Llama's"
        )


def _kernels() -> Kernels:
    try:
        found = importlib.import_module("liger_kernel.transformers.functional")
        return found.liger_rms_norm, found.liger_swiglu
    except Exception as error:
        # it is not there; it does not fit triton, or triton does not fit the device
        raise ConfigError(
            f"trainer.liger=true: liger-kernel cannot be imported: {type(error).__name__}: "
            f"{clause(error)}; pip install 'siirl_dask[liger]', or leave it out"
        ) from error


def is_norm(module: nn.Module) -> bool:
    """Return whether it computes ``weight * x / rms(x)``; norms with another formula have no
    ``variance_epsilon``.
    """
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    return hasattr(module, "variance_epsilon")


def is_feed_forward(module: nn.Module) -> bool:
    """Return whether it computes ``down(silu(gate(x)) * up(x))``."""
    if not all(hasattr(module, name) for name in _PROJECTIONS):
        return False
    return type(module.act_fn).__name__ in _SILU


def _norm(module: Any, kernel: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    # in_place: the backward pass would write over the gradient that it gets, which the residual
    # stream may share of one type, as was tried: under autocast the weight is wider
    return kernel(hidden, module.weight.to(hidden.dtype), module.variance_epsilon, in_place=False)


def _feed_forward(module: Any, kernel: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    output: Tensor = module.down_proj(kernel(module.gate_proj(hidden), module.up_proj(hidden)))
    return output
