"""Attention from a matrix of scores, for what torch's fused kernels cannot do: soft caps, and
sinks.

A soft cap bounds scores smoothly (Gemma 2, arXiv:2408.00118). A sink is a score of each head for
which there is no value, so that a token may attend to nothing (GPT-OSS, arXiv:2508.10925).
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend_by_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend to the keys that ``mask`` allows. [n, H, L, D], [n, H_kv, C, D], [n, H_kv, C, D'] ->
    [n, L, H, D'].

    ``mask`` is added to the scores and has a shape that broadcasts to [n, 1, L, C]; ``sinks`` are
    [H]. The softmax is in float32.
    """
    heads = query.shape[1]
    shared = heads // key.shape[1]
    scale = scaling
    if scaling is None:
        scale = query.shape[-1] ** -0.5
    grouped = query.unflatten(1, (-1, shared))
    scores = (grouped @ key[:, :, None].transpose(-1, -2)).flatten(1, 2).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    columns = scores.shape[-1]
    if sinks is not None:
        own = sinks.float().view(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, own], dim=-1)
    weights = scores.softmax(dim=-1)[..., :columns].to(value.dtype)
    output = weights.unflatten(1, (-1, shared)) @ value[:, :, None]
    by_token: Tensor = output.flatten(1, 2).transpose(1, 2)
    return by_token
