"""Refuses layers that attend by a mask or in a window of which an attention function is not told."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_window_is_given(module: nn.Module, attention_mask: Tensor | None, sliding_window: int | None) -> None:
    """Raise NotImplementedError where a layer has a mask of its own, or a window by its config that it does not hand to
    its attention function: it stands in a mask then, which transformers does not make for other functions than its own.

    Does nothing while layers are compiled, since each layer would be another program.
    """
    if torch.compiler.is_compiling():
        return
    name = type(module).__name__
    if attention_mask is not None:
        raise NotImplementedError(f"{name} makes a mask of its own, which only transformers' attention reads")
    if sliding_window is None and _has_window(module):
        raise NotImplementedError(f"{name} has a window that only a mask knows, which transformers' attention reads")


def _has_window(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    layer = getattr(module, "layer_idx", None)
    if kinds is None or layer is None:
        return getattr(config, "sliding_window", None) is not None
    return str(kinds[layer]) == "sliding_attention"
