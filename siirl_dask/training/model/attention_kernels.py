"""Chooses the attention kernel for packed rows: the best that is installed and runs on the device.

In this order:

FlashAttention-3 (arXiv:2407.08608), package ``flash_attn_interface``
    on Hopper.
FlashAttention-2 (arXiv:2307.08691) in torch, ``torch.nn.attention.varlen``
    on Ampere and later, where torch has it.
FlashAttention-2, package ``flash_attn``
    on Ampere and later.
FlexAttention (arXiv:2412.05496), torch and triton
    where no FlashAttention fits, and a first call succeeds.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from siirl_dask.devices import accelerator, fused
from siirl_dask.devices.operators import AUTO, FLASH, FLEX, PLUGIN, TORCH
from siirl_dask.errors import ConfigError
from siirl_dask.training.model.flex import NARROWEST, WIDEST, FlexKernel, compiled_flex, why_not

logger = logging.getLogger("siirl_dask.training")
Kernel = Callable[..., Any]
"""``torch.nn.attention.varlen.varlen_attn``, or a function of its signature."""
_SDPA = "torch's scaled_dot_product_attention, a call for each row length"
_AMPERE = (8, 0)
_HOPPER = (9, 0)
_BLACKWELL = (10, 0)  # FlashAttention-3 is compiled for Hopper alone


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """A kernel for all rows of a micro-batch at once."""

    name: str
    attend: Kernel


@dataclass(frozen=True, slots=True)
class PluginKernel:
    """torch_npu's kernel for all rows at once."""

    name: str = "npu_fusion_attention (torch_npu)"


@cache
def kernel_of(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    library: str = AUTO,
    *,
    plain: bool = True,
) -> FlashKernel | FlexKernel | PluginKernel | None:
    """Return the kernel for heads of a type and width on a device, and say so in the log, once;
    None for torch's own attention, and where there is no other. ``plain`` is attention without soft
    caps and sinks, which few kernels have. ConfigError where ``library`` has none and is not
    ``auto``.
    """
    heads = f"heads of {width} in {str(dtype).removeprefix('torch.')}"
    if not plain:
        heads += " with soft caps or sinks"
    if library == TORCH:
        return None
    if library == PLUGIN:
        kernel = None
        if plain and fused.takes_attention(dtype, width, value_width):
            kernel = PluginKernel()
        name = _SDPA if kernel is None else kernel.name
        logger.info("packed attention on %s, %s, is computed by %s", device, heads, name)
        return kernel
    chosen = _on_gpu(
        device,
        dtype,
        width=width,
        value_width=value_width,
        heads=heads,
        library=library,
        plain=plain,
    )
    if library in (FLASH, FLEX) and chosen is None:
        raise ConfigError(
            f"trainer.operators.attention={library}: it does not run on {device} for {heads}; "
            "leave it out"
        )
    return chosen


def _on_gpu(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
    heads: str,
    library: str,
    plain: bool,
) -> FlashKernel | FlexKernel | None:
    capability = accelerator.compute_capability(device)
    if capability is None:
        return None
    chosen: FlashKernel | FlexKernel | None = None
    failure: str | None = None
    if library != FLEX and plain and takes_varlen(dtype, width, value_width):
        chosen = choose_kernel(capability, accelerator.torch_has_flash())
    if chosen is None and library != FLASH:
        chosen, failure = _flex_for(device, dtype, width, value_width)
    name = _SDPA if chosen is None else chosen.name
    no_flex = ""
    if failure is not None:
        no_flex = f"; FlexAttention does not run: {failure}"
    where = f"{device} ({accelerator.name_of(device.type, device.index)})"
    logger.info("packed attention on %s, %s, is computed by %s%s", where, heads, name, no_flex)
    return chosen


def takes_varlen(dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Return whether FlashAttention can compute this, with or without a sliding window.

    torch's is compiled for bfloat16 and float16, heads of width 32, 64, 96 .. 256, and values as
    wide.
    """
    if dtype not in (torch.bfloat16, torch.float16) or width != value_width:
        return False
    return width in range(32, 257, 32)


def _flex_for(
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
) -> tuple[FlexKernel | None, str | None]:
    """Return FlexAttention, or why not: it is compiled for the device, and that is known once it
    has been tried.
    """
    if not all(NARROWEST <= each <= WIDEST for each in (width, value_width)):
        return None, f"it takes heads of {NARROWEST} to {WIDEST}"
    if find_spec("triton") is None:
        return None, "there is no triton"
    flex = compiled_flex()
    failure = why_not(flex, device, dtype, width, value_width)
    if failure is None:
        return (flex, None)
    return (None, failure)


def choose_kernel(capability: tuple[int, int], torch_has_flash: bool) -> FlashKernel | None:
    """Return the best FlashAttention that is installed for a compute capability; None where
    there is none.
    """
    if capability < _AMPERE:
        return None
    if (
        _HOPPER <= capability < _BLACKWELL
        and (function := _function_of("flash_attn_interface")) is not None
    ):
        return FlashKernel("FlashAttention-3 (flash_attn_interface)", partial(_call, function))
    if torch_has_flash:
        from torch.nn.attention.varlen import varlen_attn  # imports the compiler

        takes_groups = "enable_gqa" in signature(varlen_attn).parameters
        attend = varlen_attn if takes_groups else partial(_without_groups, varlen_attn)
        return FlashKernel("FlashAttention-2 (torch)", attend)
    function = _function_of("flash_attn")
    if function is not None:
        return FlashKernel("FlashAttention-2 (flash_attn)", partial(_call, function))
    return None


def _function_of(package: str) -> Kernel | None:
    """Return a package's function for rows of several lengths; None if it is not there or does
    not fit this torch.
    """
    try:
        function: Kernel = importlib.import_module(package).flash_attn_varlen_func
    except (ImportError, AttributeError, OSError):  # compiled for another torch, or another CUDA
        return None
    return function


def _without_groups(
    function: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Call the function of torch 2.11, which groups queries by itself and is not asked whether
    to.
    """
    output: Tensor = function(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size
    )
    return output


def _call(
    function: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Call a function of the flash_attn packages as torch's is called; they group queries by
    themselves.
    """
    output = function(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        softmax_scale=scale, causal=True, window_size=window_size,
    )  # fmt: skip
    # some versions add what a backward pass needs
    result: Tensor = output
    if isinstance(output, tuple):
        result = output[0]
    return result
