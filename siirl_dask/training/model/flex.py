"""FlexAttention (arXiv:2412.05496) over packed rows: one call of a kernel that torch.compile makes
for the device.

It takes what no FlashAttention does: float32, heads of other widths, values narrower than keys,
devices before Ampere, soft caps and sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from siirl_dask.errors import ConfigError
from siirl_dask.training.packing import Packing

_BLOCK = 128  # tokens of a block that is computed or left out; what torch tunes its kernels for
NARROWEST = 16
WIDEST = 256
"""Widths of a head that torch's kernels can have."""
# the compiler makes a kernel of its own where there is one block, or one token
_LEAST_TOKENS = 2 * _BLOCK
# windows, types and widths of heads, with and without gradients; torch's 8 are for all of a process
_GRAPHS = 64
_CURE = (
    "take trainer.operators.attention=torch, or fewer models of other heads, types and windows in "
    "one process"
)


@dataclass(frozen=True, slots=True)
class FlexKernel:
    """FlexAttention, compiled."""

    attend: Callable[..., Any]
    """``torch.nn.attention.flex_attention.flex_attention``, or a function of its signature."""
    name: str = "FlexAttention (torch)"


def compiled_flex(backend: str | Callable[..., Any] = "inductor") -> FlexKernel:
    """Return the kernel, which is compiled when it is first called, once for all lengths, by a
    backend of torch.compile. ConfigError from a call for which it is not compiled.
    """
    compiled = torch.compile(_fused, dynamic=True, fullgraph=True, backend=backend)

    def attend(*heads: Tensor, **options: Any) -> Any:
        # A soft cap is a number of the kernel: as one of its inputs, which Dynamo makes of floats,
        # it does not compile.
        with torch._dynamo.config.patch(
            recompile_limit=_GRAPHS,
            fail_on_recompile_limit_hit=True,
            specialize_float=True,
        ):
            try:
                output = compiled(*heads, **options)
            except torch._dynamo.exc.FailOnRecompileLimitHit as error:
                raise ConfigError(
                    f"FlexAttention has been compiled {_GRAPHS} times in this process, for "
                    f"{_GRAPHS} kinds of heads, and no more are allowed: {_CURE}"
                ) from error
        return output

    return FlexKernel(attend)


def _fused(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    # torch would make a [T, T] matrix of scores for each head, and only warn
    if not torch.compiler.is_compiling():
        raise ConfigError(
            "FlexAttention is called without torch.compile, which is switched off or has given "
            f"up: its unfused form takes a matrix of all tokens by all tokens; {_CURE}"
        )
    return flex_attention(query, key, value, **options)


def attend_flex(
    kernel: FlexKernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend within all rows in one call. [1, H, T, D], [1, H_kv, T, D], [1, H_kv, T, D'] -> [T, H,
    D'].

    ``ends`` are those of the rows: see ``row_ends``; ``sinks`` are [H]. The mask is made by a
    micro-batch's first layer for all others. The kernel gets whole blocks: tokens that fill the
    last one are a row of their own, and are cut off again.
    """
    tokens = query.shape[2]
    whole = whole_blocks(tokens)
    if window not in packing.masks:
        packing.masks[window] = row_mask(ends, whole, window)
    padding = (0, 0, 0, whole - tokens)
    options: dict[str, Any] = {}
    if softcap is not None:
        options["score_mod"] = _capped(softcap)
    if sinks is not None:
        options["return_aux"] = AuxRequest(lse=True)
    output = kernel.attend(
        pad(query, padding),
        pad(key, padding),
        pad(value, padding),
        block_mask=packing.masks[window],
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        **options,
    )
    if sinks is not None:
        attended, found = output
        # of all weights, the sink's included
        share = torch.sigmoid(found.lse.float() - sinks.float()[:, None])
        output = (attended * share[..., None]).to(value.dtype)
    result: Tensor = output[0, :, :tokens].transpose(0, 1)
    return result


@cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    """Return the same function for the same cap, so that a kernel is compiled once."""

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def whole_blocks(tokens: int) -> int:
    """Return the least number of tokens, at least ``tokens``, of which one compiled kernel takes
    all: whole blocks, and more than one.
    """
    return max(_LEAST_TOKENS, -(-tokens // _BLOCK) * _BLOCK)


def row_mask(ends: Tensor, tokens: int, window: int | None) -> BlockMask:
    """Return the mask of packed rows: causal within each, and no further back than a window, the
    token included.

    ``ends`` are those of the rows, [R + 1]; tokens after the last row are a row of their own.
    Blocks follow from the rows of their first and last tokens, so no [T, T] matrix is made.
    """
    row = torch.bucketize(torch.arange(tokens, device=ends.device), ends[1:], right=True)

    def is_seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (row[query] == row[key]) & (query >= key)
        if window is None:
            return same
        return same & (query - key < window)

    first = torch.arange(0, tokens, _BLOCK, device=ends.device)
    last = (first + _BLOCK - 1).clamp(max=tokens - 1)
    query_first = first[:, None]
    query_last = last[:, None]
    some = (first <= query_first) & (row[last] >= row[query_first])
    whole = (first < query_first) & (row[first] == row[query_last])
    if window is not None:
        some &= query_first - last < window
        whole &= query_last - first < window
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_seen,
        seq_lengths=(tokens, tokens),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of keys each block of queries has, and which, those first. [B, B]
    -> [1, 1, B] and B.
    """
    counts = chosen.sum(-1, dtype=torch.int32)
    order = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts[None, None], order[None, None]


def why_not(
    kernel: FlexKernel,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    value_width: int,
) -> str | None:
    """Return why the kernel does not compile, run and learn on a device; None where it does, on
    two short rows.
    """
    ends = torch.tensor([0, 5, _BLOCK + 20], dtype=torch.int32, device=device)
    runs = ((1, 5), (1, _BLOCK + 15))
    query, key, value = (
        torch.zeros(1, count, _BLOCK + 20, each, dtype=dtype, device=device, requires_grad=True)
        for count, each in ((2, width), (1, width), (1, value_width))
    )
    try:
        with torch.enable_grad():
            attend_flex(
                kernel,
                query,
                key=key,
                value=value,
                ends=ends,
                packing=Packing(runs),
                scaling=None,
                window=None,
            ).sum().backward()
    except Exception as error:
        # the compiler's and Triton's: no program for this device, too little shared memory, ...
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None
