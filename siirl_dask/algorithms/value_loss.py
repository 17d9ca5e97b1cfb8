"""The loss that a critic trains on: the squared distance of its values to the returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from siirl_dask.algorithms.losses import TokenLoss


@dataclass(kw_only=True, slots=True)
class ValueInputs:
    """The K tokens of R rows that a critic's loss trains on, row after row. Gradients flow
    through ``values``.
    """

    values: Tensor
    """[K] values of the current critic."""
    old_values: Tensor
    """[K] values of the critic before this step's update."""
    returns: Tensor
    """[K] returns, which the values should predict."""
    offsets: Tensor
    """[R + 1] int64: row r owns tokens ``offsets[r]`` to ``offsets[r + 1]``, perhaps none."""


ValueLossFn = Callable[[ValueInputs], TokenLoss]
"""``ValueInputs -> TokenLoss``: a critic's loss."""


def value_clip(inputs: ValueInputs, *, clip: float = 0.5) -> TokenLoss:
    """Return ``0.5 max((v - R)^2, (v' - R)^2)``, v' being v clipped to the old value +- ``clip``,
    as in PPO's published code (arXiv:2005.12729). [K].

    ``clip: .inf`` leaves the plain squared error.

    Metrics: ``value``; ``clip_fraction``, tokens whose clipped square is the larger; ``return``,
    ``return_squared`` and ``error_squared``. Their means give the explained variance: ``1 -
    (error_squared - (return - value)^2) / (return_squared - return^2)``.
    """
    clipped_values = torch.clamp(inputs.values, inputs.old_values - clip, inputs.old_values + clip)
    unclipped = (inputs.values - inputs.returns).square()
    clipped = (clipped_values - inputs.returns).square()
    metrics = {
        "value": inputs.values.detach(),
        "clip_fraction": (clipped > unclipped).to(unclipped.dtype),
        "return": inputs.returns,
        "return_squared": inputs.returns.square(),
        "error_squared": unclipped.detach(),
    }
    return TokenLoss(loss=0.5 * torch.maximum(unclipped, clipped), metrics=metrics)
