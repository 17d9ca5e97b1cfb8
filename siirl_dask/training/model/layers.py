"""How layers compute: compiled, or again in the backward pass instead of keeping their activations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from siirl_dask.training.model.attention import leave_uncompiled


def compile_layers(layers: Iterable[nn.Module]) -> None:
    """Compile each layer except its attention with torch.compile, once for all lengths."""
    leave_uncompiled()
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def recompute(layers: Iterable[nn.Module]) -> None:
    """Keep only each layer's input for the backward pass, which computes the rest again (arXiv:1604.06174)."""
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
