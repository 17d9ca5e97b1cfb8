"""Pins rotary frequencies that would follow the longest row of a pass (``longrope``): see
models/longest_row.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from siirl_dask.errors import ConfigError

_LONGROPE = ("longrope", "su")  # its name in earlier configs
_DYNAMIC = "dynamic"
_ORIGINAL = "original_max_position_embeddings"
_CONSTANT = "default"  # a rope_type for which transformers computes no frequencies in a pass
_PINNED = "_siirl_has_pinned_frequencies"  # attribute of a module


def pin_frequencies(model: nn.Module, longest_row: int | None, subject: str) -> None:
    """Give all rows the frequencies that transformers has for a row of ``longest_row`` tokens;
    None: of short rows.

    Rows of at most the original context have the same frequencies anyway, so nothing is done where
    no row is longer. ConfigError, beginning with ``subject``, for frequencies that nothing pins.
    """
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, Mapping):
            for layer_type, kind in kinds.items():
                if _follows(module, kind, layer_type, longest_row):
                    _pin(module, str(kind), layer_type, f"{subject}: {name}")
        elif _follows(module, kinds, None, longest_row):
            _pin(module, str(kinds), None, f"{subject}: {name}")


def has_pinned_frequencies(model: nn.Module) -> bool:
    """Return whether ``pin_frequencies`` has changed any of the model's modules."""
    return any(getattr(module, _PINNED, False) for module in model.modules())


def _follows(module: Any, kind: object, layer_type: str | None, longest_row: int | None) -> bool:
    """Return whether rows of ``longest_row`` tokens have other frequencies in the module than
    short ones.
    """
    if longest_row is None:
        return False
    if kind in _LONGROPE:
        return longest_row > int(_settings_of(module, layer_type)[_ORIGINAL])
    if kind != _DYNAMIC:
        return False
    return longest_row > int(module.config.max_position_embeddings)


def _settings_of(module: Any, layer_type: str | None) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = module.config.rope_parameters
    return settings if layer_type is None else settings[layer_type]


def _pin(module: Any, kind: str, layer_type: str | None, subject: str) -> None:
    """Give a module the frequencies of long rows, and have transformers leave them as they are.

    ConfigError unless it then computes the same for a token alone and beside one that is far
    behind.
    """
    refused = ConfigError(
        f"{subject} ({type(module).__name__}) has rotary frequencies (rope_type {kind!r}) that "
        "follow the longest row of a pass and cannot be pinned; take rows within the model's "
        "original context, prompt and response"
    )
    prefix = ""
    if layer_type is not None:
        prefix = f"{layer_type}_"
    before = getattr(module, f"{prefix}inv_freq", None)
    if kind not in _LONGROPE or before is None:
        raise refused
    original = int(_settings_of(module, layer_type)[_ORIGINAL])
    of_layers = {}
    if layer_type is not None:
        of_layers = {"layer_type": layer_type}
    compute = ROPE_INIT_FUNCTIONS["longrope"]
    frequencies, scale = compute(module.config, before.device, seq_len=original + 1, **of_layers)
    module.register_buffer(f"{prefix}inv_freq", frequencies, persistent=False)
    module.register_buffer(f"{prefix}original_inv_freq", frequencies.clone(), persistent=False)
    setattr(module, f"{prefix}attention_scaling", scale)
    if layer_type is None:
        module.rope_type = _CONSTANT
    else:
        module.rope_type = {**module.rope_type, layer_type: _CONSTANT}
    setattr(module, _PINNED, True)
    like = frequencies[None, None]
    places = torch.tensor([[1, 2, original + 1]], device=before.device)
    alone, _ = module(like, places[:, :2], **of_layers)
    beside, _ = module(like, places, **of_layers)
    if not torch.equal(alone, beside[:, :2]):
        raise refused
