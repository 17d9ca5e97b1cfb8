"""Routes of a mixture of experts: which experts each token goes to in each layer (R3,
arXiv:2510.11370).

An engine records the routes that it takes, and a trainer replays them. The routes of a token are
its experts in the first layer that has any, then those in the next, a byte each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config, understood

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

NO_EXPERT = 255
"""Byte that stands for a route that nobody has recorded."""
_FAMILY = "qwen3_moe"  # others weigh their experts by other formulas
_ROUTER = "TopKRouter"  # how transformers' class names of routers end


@dataclass(frozen=True, slots=True)
class Routing:
    """Layers that have experts, and how many."""

    layers: tuple[int, ...]
    """Indices in the decoder of the layers that have experts."""
    experts: int
    """Experts of each of these layers."""
    chosen: int
    """Experts that each token goes to in such a layer."""

    @property
    def width(self) -> int:
        """Experts that a token goes to in all layers: the bytes of its routes."""
        return len(self.layers) * self.chosen


def read_routing(path: str) -> Routing | None:
    """Read how the model in a folder, on any fsspec URL, routes; None without a ``config.json``.

    ConfigError, by ``rollout.router_replay``, for a model whose routes cannot be replayed.
    """
    config = read_config(path)
    if config is None:
        return None
    family = config.get("model_type")
    if family != _FAMILY:
        raise ConfigError(
            f"rollout.router_replay=true: model.path={path!r} is a {family}, and routes are "
            f"replayed of mixtures of experts of the kind {_FAMILY} alone; leave it out"
        )
    routing = understood(path, config, _routing)
    if not routing.layers or routing.experts > NO_EXPERT:
        raise ConfigError(
            f"rollout.router_replay=true: model.path={path!r} has {len(routing.layers)} layers of "
            f"{routing.experts} experts; expected at least one, of at most {NO_EXPERT} experts: a "
            "route is a byte; leave it out"
        )
    return routing


def needed_routing(path: str) -> Routing:
    """Read as ``read_routing`` does. ConfigError also where there is no ``config.json``."""
    routing = read_routing(path)
    if routing is None:
        raise ConfigError(
            f"rollout.router_replay=true: model.path={path!r} has no config.json; expected a model"
        )
    return routing


def _routing(config: Mapping[str, Any]) -> Routing:
    from transformers import CONFIG_MAPPING  # takes two seconds

    whole = CONFIG_MAPPING[_FAMILY].from_dict(dict(config))
    dense = {*(whole.mlp_only_layers or ())}
    each = whole.decoder_sparse_step
    layers = []
    for at in range(whole.num_hidden_layers):
        if whole.num_experts and at not in dense and (at + 1) % each == 0:
            layers.append(at)
    return Routing(tuple(layers), whole.num_experts, whole.num_experts_per_tok)


def routers(model: PreTrainedModel, routing: Routing) -> list[tuple[nn.Module, nn.Module]]:
    """Return each layer that has experts, with its router, in order. ConfigError where they are
    not found.
    """
    layers = list(model.get_decoder().layers)
    found = []
    for at in routing.layers:
        own = [module for module in layers[at].modules() if type(module).__name__.endswith(_ROUTER)]
        if len(own) != 1:
            raise ConfigError(
                f"rollout.router_replay=true: layer {at} of {type(model).__name__} has {len(own)} "
                "routers, expected one; leave it out"
            )
        found.append((layers[at], own[0]))
    return found
