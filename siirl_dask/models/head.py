"""The factor and the soft cap that some models apply to the product of hidden states and head
before it is logits.

Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale`` and Falcon-H1 by
``lm_head_multiplier``; Gemma 2 (arXiv:2408.00118) and others bound logits smoothly by
``final_logit_softcapping``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """How logits follow from ``hidden @ weight.T + bias``: ``cap * tanh(factor * product /
    cap)``.
    """

    factor: float = 1.0
    cap: float | None = None
    """None: logits are not bounded."""

    def logits(self, product: Tensor) -> Tensor:
        """Return the logits of products, of the same shape."""
        scaled = product * self.factor
        if self.cap is None:
            return scaled
        return self.cap * torch.tanh(scaled / self.cap)


def head_output(config: Any) -> HeadOutput:
    """Return what a model with this config, of its text part, does with its head's product."""
    factor = 1.0
    for name in ("lm_head_multiplier", "logit_scale"):
        value = getattr(config, name, None)
        if isinstance(value, int | float):
            factor *= value
    divisor = getattr(config, "logits_scaling", None)
    if divisor is not None:
        factor /= divisor
    return HeadOutput(factor, getattr(config, "final_logit_softcapping", None))
