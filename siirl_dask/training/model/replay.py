"""Replays an engine's routes in a model: each token goes to the experts that it went to there (R3,
arXiv:2510.11370).

The weights of the experts are the model's own, of its router's logits, so that the router learns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from siirl_dask.models.routing import Routing, routers
from siirl_dask.training.packing import packing_of


def replay_routes(model: PreTrainedModel, routing: Routing) -> None:
    """Let the model go by ``Packing.routes`` where a pass has some. Layers are recomputed with the
    same routes if that is switched on after this.
    """
    for place, (layer, router) in enumerate(routers(model, routing)):
        held = _ReplayedRoutes()
        own = slice(place * routing.chosen, (place + 1) * routing.chosen)
        router.forward = partial(_route, router, router.forward, held)
        layer.forward = partial(_with_routes, layer, layer.forward, held, own)


@dataclass(slots=True)
class _ReplayedRoutes:
    """Routes that a layer has told its router, for the pass under way."""

    routes: Tensor | None = None
    """[T, k] int64, -1 where the router chooses; None: it chooses everywhere."""


def _with_routes(
    layer: nn.Module,
    forward: Callable[..., Any],
    held: _ReplayedRoutes,
    own: slice,
    *args: Any,
    **kwargs: Any,
) -> Any:
    packing = packing_of(layer)
    held.routes = None if packing is None or packing.routes is None else packing.routes[:, own]
    try:
        return forward(*args, **kwargs)
    finally:
        held.routes = None


def _route(
    router: Any,
    forward: Callable[..., Any],
    held: _ReplayedRoutes,
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [T, E], and weights and numbers [T, k] of the experts that each token goes
    to.
    """
    logits, weights, own = forward(hidden)
    if held.routes is None:
        return logits, weights, own
    experts = torch.where(held.routes < 0, own, held.routes)
    chosen = logits.softmax(-1, dtype=torch.float).gather(-1, experts)
    if router.norm_topk_prob:
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    return logits, chosen.to(weights.dtype), experts
