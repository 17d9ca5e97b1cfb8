"""Where each parameter of a Hugging Face model lies in megatron-core's, and which part of it a rank
holds.

megatron-core joins queries, keys and values into one matrix, group by group of heads, and gate and
up into another. A rank's part of a parameter is a slice of it along one dimension, or all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from torch import Tensor

from siirl_dask.training.megatron.families import LayerSizes

HEAD = "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_QUERIES = "q"
_KEYS = "k"
_VALUES = "v"
_GATE = "gate"
_UP = "up"


@dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a parameter lies in megatron-core's model."""

    parameter: str
    """Name in the stage; in these tables without the number of chunk and layer."""
    split: int | None = None
    """Dimension along which the ranks of a stage share it; None: each has all of it."""
    piece: str = ""
    """Which piece of a joined parameter it is; empty: all of it."""
    of_experts: bool = False
    """Whether those who share it are the ranks over which experts are spread."""


_ENDS = {
    "model.embed_tokens.weight": ParameterPlace("embedding.word_embeddings.weight", 0),
    "model.norm.weight": ParameterPlace("decoder.final_layernorm.weight"),
    HEAD: ParameterPlace("output_layer.weight", 0),
}
_BESIDE = {"value_head.weight", "value_head.bias"}  # the stage's own, of no chunk
_IN_LAYER = {
    "self_attn.q_proj.weight": ParameterPlace("self_attention.linear_qkv.weight", 0, _QUERIES),
    "self_attn.k_proj.weight": ParameterPlace("self_attention.linear_qkv.weight", 0, _KEYS),
    "self_attn.v_proj.weight": ParameterPlace("self_attention.linear_qkv.weight", 0, _VALUES),
    "self_attn.q_proj.bias": ParameterPlace("self_attention.linear_qkv.bias", 0, _QUERIES),
    "self_attn.k_proj.bias": ParameterPlace("self_attention.linear_qkv.bias", 0, _KEYS),
    "self_attn.v_proj.bias": ParameterPlace("self_attention.linear_qkv.bias", 0, _VALUES),
    "self_attn.o_proj.weight": ParameterPlace("self_attention.linear_proj.weight", 1),
    "self_attn.q_norm.weight": ParameterPlace("self_attention.q_layernorm.weight"),
    "self_attn.k_norm.weight": ParameterPlace("self_attention.k_layernorm.weight"),
    "mlp.gate_proj.weight": ParameterPlace("mlp.linear_fc1.weight", 0, _GATE),
    "mlp.up_proj.weight": ParameterPlace("mlp.linear_fc1.weight", 0, _UP),
    "mlp.down_proj.weight": ParameterPlace("mlp.linear_fc2.weight", 1),
    "mlp.gate.weight": ParameterPlace("mlp.gate.weight"),
    "mlp.experts.gate_up_proj": ParameterPlace("mlp.gate_up_proj", 0, of_experts=True),
    "mlp.experts.down_proj": ParameterPlace("mlp.down_proj", 0, of_experts=True),
    "input_layernorm.weight": ParameterPlace("input_layernorm.weight"),
    "post_attention_layernorm.weight": ParameterPlace("pre_mlp_layernorm.weight"),
}


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter belongs to; None for one outside of the
    layers.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return None
    return int(match[1])


def place_of(name: str, chunk: int, layer: int = 0) -> ParameterPlace:
    """Return where the Hugging Face parameter ``name`` lies in a stage that has it in this
    ``chunk``, and there in the ``layer`` of this number, if it belongs to one.

    KeyError for a name that no known family has.
    """
    if name in _BESIDE:
        return ParameterPlace(name)
    match = _LAYER.fullmatch(name)
    place = _ENDS[name] if match is None else _IN_LAYER[match[2]]
    within = ""
    if match is not None:
        within = f"decoder.layers.{layer}."
    return replace(place, parameter=f"chunks.{chunk}.{within}{place.parameter}")


def piece_of(held: Tensor, place: ParameterPlace, sizes: LayerSizes) -> Tensor:
    """Return a view of what a rank holds of one Hugging Face parameter in ``held``, a parameter of
    megatron-core.

    Queries, keys and values are [groups, heads of each, width, ...]; all else has the shape of the
    rank's part.
    """
    if place.piece in (_GATE, _UP):
        gate, up = held.chunk(2)
        if place.piece == _GATE:
            return gate
        return up
    if not place.piece:
        return held
    per = sizes.heads // sizes.kv_heads
    heads = held.view(-1, per + 2, sizes.head_dim, *held.shape[1:])
    ends = {_QUERIES: slice(0, per), _KEYS: slice(per, per + 1), _VALUES: slice(per + 1, per + 2)}
    return heads[:, ends[place.piece]]
