"""Rows with routes that no engine took."""

from dataclasses import replace

import torch

from siirl_dask.testing.rows import split_rows


def routed(rows, layers, experts, chosen):
    """The rows with some experts for each token and layer, of a row's last one none. They are drawn
    at random, the same for the same prompt and for the same row, whichever others are there.
    """
    parts = []
    for row, prompt in split_rows(rows):
        own = torch.cat([_drawn(part, layers, experts, chosen) for part in (row[:prompt], row)])
        own = torch.cat([own[:prompt], own[2 * prompt :]])
        own[-1] = -1
        parts.append(own)
    routes = torch.cat(parts) if parts else torch.empty(0, layers * chosen)
    return replace(rows, routes=routes.to(torch.int16))


def _drawn(tokens, layers, experts, chosen):
    numbers = torch.Generator().manual_seed(int((tokens * torch.arange(1, len(tokens) + 1)).sum()))
    return (
        torch.rand(len(tokens), layers, experts, generator=numbers)
        .argsort(-1)[..., :chosen]
        .flatten(1)
    )
