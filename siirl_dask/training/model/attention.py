"""Attention over packed rows: causal, each row by itself, without a [T, T] mask.

transformers' packed sdpa builds that mask and costs as much as padding to all T tokens. Here rows
of equal length, which a micro-batch packs side by side, share one call. On GPUs all rows share one
call of FlashAttention or of
FlexAttention: see ``attention_kernels``.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, chain, repeat

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from siirl_dask.devices import accelerator, fused
from siirl_dask.models.score_attention import attend_by_scores
from siirl_dask.models.spans import register_with_probe, window_of
from siirl_dask.training.model.attention_kernels import FlashKernel, Kernel, PluginKernel, kernel_of
from siirl_dask.training.model.flex import FlexKernel, attend_flex
from siirl_dask.training.packing import Packing, Runs, packing_of
from siirl_dask.training.parallel.ulysses import to_heads, to_tokens

PACKED = "siirl_packed"
"""Name of ``packed_attention`` in transformers. No mask function has that name, so transformers
makes no mask."""
# least number of queries per call with a mask: fewer are slower, more need larger masks
_BLOCK = 512


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attend within each packed row. [1, H, T, D], [1, H_kv, T, D] twice -> [1, T, H, D].

    Without ``packing`` it is that of the model's pass under way. With sequence parallelism T are
    this rank's tokens, and each attends to its row's tokens on all ranks; where rows share prompts,
    they are those that are computed. ``s_aux`` are sinks, [H]. NotImplementedError for attention
    with a position bias or a mask of its own.
    """
    if packing is None:
        packing = packing_of(module)
    if packing is None:
        raise TypeError(f"{type(module).__name__} attends outside of a pass over packed rows")
    if position_bias is not None or attention_mask is not None:
        what = "a mask of its own"
        if position_bias is not None:
            what = "a position bias"
        raise NotImplementedError(
            f"packed attention supports no {what}, which {type(module).__name__} has"
        )
    window = window_of(module, sliding_window)
    ranks = packing.ranks
    if ranks is not None:
        query, key, value = to_heads(query, key, value, ranks)
        if s_aux is not None:
            s_aux = s_aux.unflatten(0, (ranks.size, -1))[ranks.rank]
    if packing.shared is not None:
        query, key, value = packing.shared.spread([query, key, value])
    dtype = accelerator.arithmetic_dtype(query)
    kernel = kernel_of(
        query.device,
        dtype,
        query.shape[-1],
        value.shape[-1],
        packing.library,
        plain=softcap is None and s_aux is None,
    )
    if kernel is not None:
        query, key, value = (each.to(dtype) for each in (query, key, value))
    match kernel:
        case FlashKernel(attend=attend):
            output = attend_varlen(
                attend, query, key=key, value=value, packing=packing, scaling=scaling, window=window
            )
        case FlexKernel():
            ends = _ends(packing, query)
            output = attend_flex(
                kernel,
                query,
                key=key,
                value=value,
                ends=ends,
                packing=packing,
                scaling=scaling,
                window=window,
                softcap=softcap,
                sinks=s_aux,
            )
        case PluginKernel():
            output = _attend_rows(
                query, key, value=value, packing=packing, scaling=scaling, window=window
            )
        case None:
            scores = Scores(scaling, window, softcap, s_aux)
            output = _attend_runs(query, key, value, packing.runs, scores)
    if packing.shared is not None:
        output = packing.shared.gather(output)
    return (output if ranks is None else to_tokens(output, ranks))[None], None


def attend_varlen(
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within all rows in one call of ``kernel``. [1, H, T, D], [1, H_kv, T, D] twice ->
    [T, H, D].
    """
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    ends = _ends(packing, query)
    longest = max(length for _, length in packing.runs)
    # a window includes the token itself, the kernel's does not
    before = -1
    if window is not None:
        before = window - 1
    output: Tensor = kernel(
        q, k, v, ends, ends, longest, longest,
        scale=scaling, window_size=(before, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return output


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Attend within all rows by torch_npu. [1, H, T, D], [1, H_kv, T, D] twice -> [T, H, D]."""
    q, k, v = (each[0].transpose(0, 1).contiguous() for each in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return fused.attend_rows(q, k, v, ends=ends_on_host(packing.runs), scale=scale, window=window)


def _ends(packing: Packing, query: Tensor) -> Tensor:
    if packing.ends is None:
        return row_ends(packing.runs, query.device)
    return packing.ends


def ends_for_kernels(runs: Runs, device: torch.device) -> Tensor | None:
    """Return ``row_ends`` on a device whose kernels may want them; None on a CPU, which has no
    such kernel.
    """
    if device.type == "cpu":
        return None
    return row_ends(runs, device)


def ends_on_host(runs: Runs) -> list[int]:
    """Return where each row ends, on the host."""
    return [*accumulate(chain.from_iterable(repeat(length, count) for count, length in runs))]


def row_ends(runs: Runs, device: torch.device) -> Tensor:
    """Return where each row begins and the last one ends, the kernels' cu_seqlens. [R + 1]
    int32.
    """
    counts, lengths = torch.tensor(runs).unbind(1)
    ends = lengths.repeat_interleave(counts).cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(device, torch.int32)


@dataclass(frozen=True, slots=True)
class Scores:
    """How a layer weighs what a token sees."""

    scaling: float | None = None
    """Factor of queries times keys; None: ``D ** -0.5``."""
    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H]."""


def _attend_runs(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scores: Scores) -> Tensor:
    """Attend in one call per run of equal lengths. [1, H, T, D], [1, H_kv, T, D] twice -> [T, H,
    D].
    """
    sizes = [count * length for count, length in runs]
    parts = zip(
        runs,
        query.split(sizes, dim=2),
        key.split(sizes, dim=2),
        value.split(sizes, dim=2),
        strict=True,
    )
    outputs = []
    for (count, length), *packed in parts:
        # rows of one length: [1, H, count * length, D] -> [count, H, length, D]
        q, k, v = (part[0].unflatten(1, (count, length)).transpose(0, 1) for part in packed)
        outputs.append(_attend(q, k, v, scores).flatten(0, 1))
    return torch.cat(outputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Attend within rows of one length L. [n, H, L, D], [n, H_kv, L, D] twice -> [n, L, H, D]."""
    length = query.shape[2]
    plain = all(each is None for each in (scores.softcap, scores.sinks))
    window = length if scores.window is None else min(scores.window, length)
    if plain and window == length:
        return _sdpa(query, key, value, None, scores.scaling)
    # A block of queries sees its own keys and a window before: with a window, memory is linear in
    # L.
    block = _BLOCK if window == length else max(window, _BLOCK)
    outputs = []
    for start in range(0, length, block):
        stop = min(length, start + block)
        first = max(0, start - window + 1)
        positions = torch.arange(first, stop, device=query.device)
        distance = positions[start - first :, None] - positions
        seen = (distance >= 0) & (distance < window)
        q = query[:, :, start:stop]
        k = key[:, :, first:stop]
        v = value[:, :, first:stop]
        if plain:
            outputs.append(_sdpa(q, k, v, seen, scores.scaling))
        else:
            mask = torch.zeros(seen.shape, device=query.device).masked_fill_(~seen, -torch.inf)
            outputs.append(
                attend_by_scores(
                    q,
                    k,
                    v,
                    mask,
                    scaling=scores.scaling,
                    softcap=scores.softcap,
                    sinks=scores.sinks,
                )
            )
    return torch.cat(outputs, dim=1)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    """Call torch's attention, causal if ``mask`` is None. [n, H, L, D], [n, H_kv, L', D] twice
    -> [n, L, H, D].
    """
    output = accelerator.attend(query, key, value, mask, causal=mask is None, scale=scaling)
    return output.transpose(1, 2)


PACKED_PROBE = register_with_probe(PACKED, packed_attention)
"""Name of the same attention for a model's first pass, which finds out its windows."""


def leave_uncompiled() -> None:
    """Exclude attention from torch.compile, since rows differ in every pack. Called late: it
    imports the compiler.
    """
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))
