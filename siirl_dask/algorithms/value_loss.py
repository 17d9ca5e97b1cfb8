"""What a critic learns from: the squared distance of its values to the returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import TokenLoss


@dataclass(kw_only=True, slots=True)
class ValueInputs:
    """The tokens of R rows that are learned from, row after row: K tokens. Gradients flow through ``values``."""

    values: Tensor
    """[K] current critic."""
    old_values: Tensor
    """[K] critic before this step's update."""
    returns: Tensor
    """[K]."""
    offsets: Tensor
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none."""


ValueLossFn = Callable[[ValueInputs], TokenLoss]


def value_clip(inputs: ValueInputs, *, clip: float = 0.5) -> TokenLoss:
    """``0.5 max((v - R)^2, (v' - R)^2)`` with v' = v clipped to the old value +- ``clip``, as in PPO's published code
    (arXiv:2005.12729). ``clip: .inf`` leaves the square alone.

    Metrics: ``value``; ``clip_fraction``, tokens whose clipped square is the larger; ``return``, ``return_squared`` and
    ``error_squared``, whose means give the explained variance:
    ``1 - (error_squared - (return - value)^2) / (return_squared - return^2)``.
    """
    near = torch.clamp(inputs.values, inputs.old_values - clip, inputs.old_values + clip)
    plain = (inputs.values - inputs.returns).square()
    clipped = (near - inputs.returns).square()
    metrics = {
        "value": inputs.values.detach(),
        "clip_fraction": (clipped > plain).to(plain.dtype),
        "return": inputs.returns,
        "return_squared": inputs.returns.square(),
        "error_squared": plain.detach(),
    }
    return TokenLoss(loss=0.5 * torch.maximum(plain, clipped), metrics=metrics)
