"""Operators of torch_npu, called as the references in torch are: see
``training/model/operators.py`` for these.

What torch_npu's documentation refuses of a tensor is computed by the caller's reference: a function
says what fits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

_WIDEST_ROTARY = 896
_MOST_HEADS = 1000
_WIDEST_HEAD = 768
# size of the compressed causal mask that the modes below want, whatever the rows' lengths
_MASK = 2048
_CAUSAL = 3  # mode of the mask: aligned at the lower right
_BAND = 4  # mode of the mask: within a window


def takes_rotary(heads: Tensor) -> bool:
    """Return whether ``rotary`` takes heads [B, H, T, D]."""
    batch, count, _, width = heads.shape
    if width % 2 or width >= _WIDEST_ROTARY:
        return False
    return max(batch, count) < _MOST_HEADS


def rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves: ``x * cos + (-x2, x1) * sin``. [B, H, T, D], [B, 1, T, D] twice, of one
    type.
    """
    rotated: Tensor = _library().npu_rotary_mul(
        heads.contiguous(), cos.contiguous(), sin.contiguous()
    )
    return rotated


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``x / rms(x) * weight``, of one type. [..., D], [D]."""
    normed: Tensor = _library().npu_rms_norm(hidden, weight, epsilon=epsilon)[0]
    return normed


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``. [..., F] twice."""
    output: Tensor = _library().npu_swiglu(torch.cat([gate, up], dim=-1), dim=-1)
    return output


def takes_attention(dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Return whether ``attend_rows`` takes heads of a type and width."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return width == value_width <= _WIDEST_HEAD


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Sequence[int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Attend within packed rows, causal, and no further back than ``window``.

    [T, H, D], [T, H_kv, D] twice -> [T, H, D]. ``ends`` are where rows end, on the host.
    """
    output: Tensor = _library().npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=causal_mask(query.device),
        scale=scale,
        actual_seq_qlen=list(ends),
        actual_seq_kvlen=list(ends),
        sparse_mode=_CAUSAL if window is None else _BAND,
        **({} if window is None else {"pre_tockens": window - 1, "next_tockens": 0}),
    )[0]
    return output


def adamw(
    parameter: Tensor,
    gradient: Tensor,
    moments: tuple[Tensor, Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Take step 1, 2, ... of AdamW, in place. All tensors have one shape, in float32."""
    # the operator multiplies them by the betas itself
    first, second = (beta ** (step - 1) for beta in betas)
    beta1, beta2 = betas
    _library().npu_apply_adam_w(
        first,
        second,
        lr,
        weight_decay,
        beta1,
        beta2,
        eps,
        gradient,
        None,
        False,
        False,
        out=(parameter, *moments),
    )


@cache
def causal_mask(device: torch.device) -> Tensor:
    """Return the compressed causal mask that npu_fusion_attention wants, whatever the rows'
    lengths.
    """
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)


@cache
def _library() -> Any:
    return importlib.import_module("torch_npu")
