"""Fused rotary embeddings, norms and feed-forward layers in a model's modules, beside their
references in torch.

They go into the modules of one model: other roles of the process may have the same classes.
Attention is transformers' AttentionInterface's, see ``attention``; AdamW is the optimizer's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from siirl_dask.devices import fused
from siirl_dask.devices.operators import PLUGIN
from siirl_dask.training.model.liger import is_feed_forward, is_norm

logger = logging.getLogger("siirl_dask.training")
Norm = Callable[[Tensor, Tensor, float], Tensor]
Gate = Callable[[Tensor, Tensor], Tensor]
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
_ROTARY = "apply_rotary_pos_emb"  # transformers' function of each model's file that attention calls


def rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves (arXiv:2104.09864): ``x * cos + (-x2, x1) * sin``. [B, H, T, D], [B, 1, T,
    D] twice.
    """
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``weight * x / rms(x)`` (arXiv:1910.07467), the mean in float32. [..., D], [D]."""
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(
        hidden.dtype
    )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` (arXiv:2002.05202). [..., F] twice."""
    return silu(gate) * up


def use_operators(modules: Iterable[nn.Module], chosen: Mapping[str, str]) -> None:
    """Let a model compute with torch_npu's operators where those are ``chosen``, and log all
    choices, each once.

    Modules of other formulas, such as Gemma's norms, stay. Liger's are put in by ``use_liger``.
    """
    own = {operator for operator, library in chosen.items() if library == PLUGIN}
    for module in modules:
        if "rms_norm" in own and is_norm(module):
            module.forward = partial(_forward_norm, module, _norm)
        elif "swiglu" in own and is_feed_forward(module):
            module.forward = partial(_forward_feed_forward, module, fused.swiglu)
        elif "rotary" in own and (forward := rotating(module, _rotary)) is not None:
            module.forward = forward
    say(chosen)


def say(chosen: Mapping[str, str]) -> None:
    """Log which library computes which operator, each choice once."""
    _say(", ".join(f"{operator} by {library}" for operator, library in chosen.items()))


@cache
def _say(text: str) -> None:
    logger.info("operators: %s", text)


def _norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return fused.rms_norm(
        hidden, weight.to(hidden.dtype), epsilon
    )  # of one type: under autocast the weight is wider


def _rotary(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if fused.takes_rotary(heads):
        return fused.rotary(heads, cos, sin)
    return rotary(heads, cos, sin)


def rotating(module: nn.Module, rotate: Rotate) -> Callable[..., Any] | None:
    """Return an attention's forward that rotates by ``rotate``; None for a module that does not
    rotate by itself.

    The function is looked up among the globals of the model's file: the forward gets globals of its
    own, with another.
    """
    forward = type(module).forward
    if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
        return None
    names = {**forward.__globals__, _ROTARY: partial(_rotate_both, rotate)}
    own = FunctionType(
        forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    return partial(own, module)


def _rotate_both(
    rotate: Rotate,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    # under autocast projections are narrower than angles
    dtype = torch.promote_types(query.dtype, cos.dtype)
    both = (each.unsqueeze(unsqueeze_dim).to(dtype) for each in (cos, sin))
    wide_cos, wide_sin = both
    return rotate(query.to(dtype), wide_cos, wide_sin), rotate(key.to(dtype), wide_cos, wide_sin)


def _forward_norm(module: Any, kernel: Norm, hidden: Tensor) -> Tensor:
    return kernel(hidden, module.weight, module.variance_epsilon)


def _forward_feed_forward(module: Any, kernel: Gate, hidden: Tensor) -> Tensor:
    output: Tensor = module.down_proj(kernel(module.gate_proj(hidden), module.up_proj(hidden)))
    return output
