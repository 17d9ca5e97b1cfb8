"""Chooses the attention kernel for packed rows: the best FlashAttention that is installed and runs on the device.

| kernel | package | devices |
|---|---|---|
| FlashAttention-3 (arXiv:2407.08608) | ``flash_attn_interface`` | Hopper |
| FlashAttention-2 (arXiv:2307.08691) in torch | ``torch.nn.attention.varlen`` | Ampere and later, where torch has it |
| FlashAttention-2 | ``flash_attn`` | Ampere and later |
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("siirl_dask.training")
Kernel = Callable[..., Any]
"""``torch.nn.attention.varlen.varlen_attn``, or a function of its signature."""
_AMPERE, _HOPPER = (8, 0), (9, 0)
_BLACKWELL = (10, 0)  # FlashAttention-3 is compiled for Hopper alone


@dataclass(frozen=True, slots=True)
class FlashKernel:
    """A kernel for all rows of a micro-batch at once."""

    name: str
    attend: Kernel


@cache
def flash_kernel(device: torch.device) -> FlashKernel | None:
    """Return the kernel for a CUDA device, and say so in the log, once; None where there is none."""
    properties = torch.cuda.get_device_properties(device)
    chosen = choose_kernel((properties.major, properties.minor), torch.backends.cuda.is_flash_attention_available())
    name = "torch's scaled_dot_product_attention, a call for each row length" if chosen is None else chosen.name
    logger.info("packed attention on %s (%s) is computed by %s", device, properties.name, name)
    return chosen


def choose_kernel(capability: tuple[int, int], torch_has_flash: bool) -> FlashKernel | None:
    """Return the best kernel that is installed for a device of a compute capability; None where there is none."""
    if capability < _AMPERE:
        return None
    if _HOPPER <= capability < _BLACKWELL and (function := _function_of("flash_attn_interface")) is not None:
        return FlashKernel("FlashAttention-3 (flash_attn_interface)", partial(_call, function))
    if torch_has_flash:
        from torch.nn.attention.varlen import varlen_attn  # imports the compiler

        return FlashKernel("FlashAttention-2 (torch)", varlen_attn)
    if (function := _function_of("flash_attn")) is not None:
        return FlashKernel("FlashAttention-2 (flash_attn)", partial(_call, function))
    return None


def _function_of(package: str) -> Kernel | None:
    """Return a package's function for rows of several lengths; None if it is not there or does not fit this torch."""
    try:
        function: Kernel = importlib.import_module(package).flash_attn_varlen_func
    except (ImportError, AttributeError, OSError):  # compiled for another torch, or another CUDA
        return None
    return function


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
    """Call a function of the flash_attn packages as torch's is called; they group queries by themselves."""
    output = function(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
        softmax_scale=scale, causal=True, window_size=window_size,
    )  # fmt: skip
    result: Tensor = output[0] if isinstance(output, tuple) else output  # some versions add what a backward pass needs
    return result
