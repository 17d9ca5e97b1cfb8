"""Reads a model's architecture, and the shapes of its parameters, from its ``config.json`` alone,
without weights.

Shapes of the families that are trained most follow from arithmetic, which takes no time; those of
others from transformers, on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from siirl_dask.errors import ConfigError, said_by
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.cache import open_model
from siirl_dask.models.remote import reached

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Shapes = dict[str, tuple[int, ...]]
T = TypeVar("T")


class ModelUse(StrEnum):
    """Use of a folder's weights; the value says which model of transformers reads them."""

    GENERATES = "generating model"
    """Policies, references, critics and engines."""
    SCORES = "sequence classifier"
    """Reward models."""
    ENCODES = "model without a head"
    """Encoders of texts."""


_SIZES = {  # the key of config.json for each field of Architecture that is a size
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
    "vocabulary": "vocab_size",
}
_TOWER_SIZES = {  # the same in the vision_config of a model that sees images
    "layers": "depth",
    "hidden": "hidden_size",
    "heads": "num_heads",
    "kv_heads": "num_heads",
    "intermediate": "intermediate_size",
}
_OF_MIXTURES = ("num_experts_per_tok", "moe_intermediate_size")
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# its width of a head where the config does not say; others divide the hidden width by the heads
_QWEN3_HEAD = 128
_TABLES = ("position_embeddings", "embed_positions", "positions_embed", "wpe")
"""Modules that are tables of positions, one for each token of a row."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """Sizes of a decoder's layers, from which its memory and its arithmetic follow."""

    layers: int
    hidden: int
    """Width of the hidden states."""
    heads: int
    """Attention heads."""
    kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Width of a head."""
    intermediate: int
    """Width of each layer's MLP."""
    vocabulary: int
    """Tokens of the vocabulary."""
    tied: bool = False
    """Whether embeddings and head are one parameter."""
    normed_heads: bool = False
    """Whether queries and keys are normalised head by head, as in Qwen3."""
    chosen: int = 0
    """Experts that compute each token in a layer of a mixture; 0: there are none."""
    expert: int = 0
    """Width of an expert."""

    @property
    def inner(self) -> int:
        """Width of a layer's MLP, or of all experts that compute a token."""
        experts = self.chosen * self.expert
        if experts:
            return experts
        return self.intermediate

    @property
    def queries(self) -> int:
        """Width of all queries of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys of a token, and of its values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Tower:
    """Sizes of the part of a model that sees images."""

    layers: Architecture
    """Sizes of its layers, which have no vocabulary."""
    patches: int
    """Patches of an image that are one token of the decoder."""


def read_tower(path: str) -> Tower | None:
    """Read the tower of the model in a folder, on any fsspec URL; None for a model of text, without
    a ``config.json``, and for a tower of another kind than the Qwen-VL models'. ConfigError if the
    file is damaged.
    """
    config = read_config(path)
    if config is None:
        return None
    return understood(path, config, _tower)


def read_architecture(path: str) -> Architecture | None:
    """Read the architecture of the model in a folder, on any fsspec URL.

    None without a ``config.json``, for a kind that transformers does not know, and for a model
    without such layers. ConfigError if the file is damaged.
    """
    config = read_config(path)
    if config is None:
        return None
    return understood(path, config, _architecture)


def shapes_by_config(path: str) -> Shapes:
    """Return name and shape of each parameter of the model that a folder's ``config.json``
    describes, tied ones once.

    Empty without that file, and for what is no generating model that transformers knows.
    ConfigError if it is damaged.
    """
    config = read_config(path)
    if config is None:
        return {}
    shapes = understood(path, config, _shapes)
    if shapes is None:
        return {}
    return shapes


def read_settings(path: str) -> PretrainedConfig | None:
    """Read the ``config.json`` of a model's folder, on any fsspec URL, as transformers' own; None
    without one, and for a kind that transformers does not know. ConfigError if it is damaged.
    """
    config = read_config(path)
    if config is None:
        return None
    return understood(path, config, _settings)


def read_config(path: str) -> dict[str, Any] | None:
    """Read the ``config.json`` of a model's folder, on any fsspec URL; None without one.

    Raises:
        ConfigError: it is damaged.
    """
    with reached(path):
        fs, folder = open_model(path)
        if not fs.exists(file := f"{folder}/config.json"):
            return None
        text = fs.cat_file(file)
    try:
        # json would take the mark at the beginning of some editors' files, transformers does not
        config = json.loads(text.decode("utf-8"), object_hook=_float_of_transformers)
        if not isinstance(config, dict):
            raise ValueError(f"a {type(config).__name__} where an object was expected")
        # null is as a key that is not there, to transformers
        if config.get("text_config", config) is None:
            del config["text_config"]
    except ValueError as error:
        raise ConfigError(
            f"model.path={path!r}: its config.json cannot be read: {error}"
        ) from error
    return config


def _float_of_transformers(found: dict[str, Any]) -> Any:
    """Return the number that transformers writes as an object, as infinity; any other object as
    it is.
    """
    if found.keys() == {"__float__"}:
        return float(found["__float__"])
    return found


def understood(path: str, config: Mapping[str, Any], take: Callable[[Mapping[str, Any]], T]) -> T:
    """Return ``take(config)``; ConfigError, by the model's path, for whatever it raises."""
    try:
        return take(config)
    except Exception as error:
        # transformers raises many kinds of errors for a config that it refuses
        raise ConfigError(
            f"model.path={path!r}: its config.json cannot be read: {said_by(error)}"
        ) from error


def _architecture(config: Mapping[str, Any]) -> Architecture | None:
    text: Mapping[str, Any] = config.get("text_config", config)
    if not all(map(text.get, _SIZES.values())):
        whole = completed(config)
        if whole is None:
            return None
        text = whole
    sizes = {field: _size(text, key) for field, key in _SIZES.items() if text.get(key) is not None}
    if len(sizes) < len(_SIZES):
        return None  # no decoder of layers that are all alike
    head = text.get("head_dim")
    if not head:
        of_qwen3 = text.get("model_type") == "qwen3"
        head = _QWEN3_HEAD if of_qwen3 else sizes["hidden"] // sizes["heads"]
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    normed = str(text.get("model_type", "")).startswith("qwen3")
    chosen = text.get("num_experts_per_tok")
    expert = text.get("moe_intermediate_size")
    if expert is None:
        expert = sizes["intermediate"]
    mixture = {}
    if isinstance(chosen, int) and isinstance(expert, int):
        mixture = {"chosen": chosen, "expert": expert}
    return Architecture(**sizes, head_dim=int(head), tied=tied, normed_heads=normed, **mixture)


def _tower(config: Mapping[str, Any]) -> Tower | None:
    vision = config.get("vision_config")
    # Qwen2-VL: hidden_size is the width of its output
    if isinstance(vision, Mapping) and vision.get("embed_dim"):
        width = _size(vision, "embed_dim")
        vision = {
            **vision,
            "hidden_size": width,
            "intermediate_size": width * _size(vision, "mlp_ratio"),
        }
    if not isinstance(vision, Mapping) or not all(
        map(vision.get, (*_TOWER_SIZES.values(), "spatial_merge_size"))
    ):
        return None
    sizes = {field: _size(vision, key) for field, key in _TOWER_SIZES.items()}
    layers = Architecture(
        **sizes,
        head_dim=sizes["hidden"] // sizes["heads"],
        vocabulary=0,
        tied=False,
        normed_heads=False,
    )
    return Tower(layers, _size(vision, "spatial_merge_size") ** 2)


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if (
        key == "intermediate_size"
        and isinstance(value, list)
        and all(isinstance(each, int) for each in value)
    ):
        value = max(value, default=0)  # Gemma 3n has one for each layer
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} is {value!r}: expected a whole number of at least 1")
    return value


def completed(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Let transformers complete a config that leaves sizes out or renames them; None for an
    unknown kind.
    """
    from transformers import CONFIG_MAPPING  # takes two seconds, and most configs do without

    if config.get("model_type") not in CONFIG_MAPPING:
        return None
    text = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)).get_text_config()
    values = {
        key: getattr(text, key, None)
        for key in (*_SIZES.values(), *_OF_MIXTURES, "head_dim", "tie_word_embeddings")
    }
    if not values["num_key_value_heads"]:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if not values["intermediate_size"]:
        values["intermediate_size"] = 4 * (values["hidden_size"] or 0)  # GPT-2's habit
    return {**values, "model_type": text.model_type}


def as_transformers_reads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` of a kind that transformers knows as it reads it: with its defaults,
    and ``rope_parameters`` in place of earlier keys, some of which go before them.
    """
    from transformers import CONFIG_MAPPING  # takes two seconds

    # transformers writes defaults into what it is given
    own = deepcopy(dict(config))
    whole: dict[str, Any] = CONFIG_MAPPING[config["model_type"]].from_dict(own).to_dict()
    return whole


def read_places(path: str, use: ModelUse) -> int | None:
    """Return the tokens that the model for a ``use`` at ``path``, on any fsspec URL, has a table of
    positions for: a longer row is an IndexError on a CPU, and on an accelerator an error of a
    kernel.

    None for one without such a table, and without a ``config.json`` of a kind that transformers
    knows. ConfigError if that is damaged.
    """
    config = read_config(path)
    if config is None:
        return None
    model = understood(path, config, partial(empty_model, use=use))
    if model is None:
        return None
    return table_places(model)


def table_places(model: PreTrainedModel) -> int | None:
    """Return the tokens that a model, which may be without memory, has a table of positions for;
    None without one.

    A table with a place for padding, as RoBERTa's, has its first token behind that place: of 514
    places 512 are for tokens.
    """
    from torch.nn import Embedding

    limits = []
    for name, module in model.named_modules():
        if isinstance(module, Embedding) and name.rpartition(".")[2] in _TABLES:
            padding = module.padding_idx
            first = 0 if padding is None else padding + 1
            limits.append(module.num_embeddings - first)
    if not limits:
        return None
    # Nystromformer's and BART's tables have two places that no token gets
    named = getattr(model.config, "max_position_embeddings", None)
    if isinstance(named, int):
        limits.append(named)
    return min(limits)


def _shapes(config: Mapping[str, Any]) -> Shapes:
    if config.get("model_type") in _FAMILIES and all(map(config.get, _SIZES.values())):
        one = _architecture(config)
        assert one is not None
        return _by_arithmetic(config, one)
    return _by_transformers(config)


def _by_arithmetic(config: Mapping[str, Any], one: Architecture) -> Shapes:
    wide = one.hidden
    narrow = (one.hidden,)
    biased = bool(config.get("attention_bias", False))
    of_layer: Shapes = {}
    for name, width in {"q_proj": one.queries, "k_proj": one.keys, "v_proj": one.keys}.items():
        of_layer[f"self_attn.{name}.weight"] = (width, wide)
        if config["model_type"] == "qwen2" or (biased and config["model_type"] != "mistral"):
            of_layer[f"self_attn.{name}.bias"] = (width,)
    of_layer["self_attn.o_proj.weight"] = (wide, one.queries)
    if biased and config["model_type"] in ("llama", "qwen3"):
        of_layer["self_attn.o_proj.bias"] = narrow
    if one.normed_heads:
        of_layer |= {f"self_attn.{name}.weight": (one.head_dim,) for name in ("q_norm", "k_norm")}
    for name, shape in {
        "gate_proj": (one.intermediate, wide),
        "up_proj": (one.intermediate, wide),
        "down_proj": (wide, one.intermediate),
    }.items():
        of_layer[f"mlp.{name}.weight"] = shape
        if config["model_type"] == "llama" and config.get("mlp_bias", False):
            of_layer[f"mlp.{name}.bias"] = shape[:1]
    of_layer |= {
        f"{name}.weight": narrow for name in ("input_layernorm", "post_attention_layernorm")
    }
    shapes: Shapes = {"model.embed_tokens.weight": (one.vocabulary, wide)}
    for layer in range(one.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    shapes["model.norm.weight"] = narrow
    if one.tied:
        return shapes
    return {**shapes, "lm_head.weight": (one.vocabulary, wide)}


def _by_transformers(config: Mapping[str, Any]) -> Shapes:
    model = empty_model(config)
    if model is None:
        return {}
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def empty_model(
    config: Mapping[str, Any], use: ModelUse = ModelUse.GENERATES
) -> PreTrainedModel | None:
    """Build the model for a ``use`` that a ``config.json`` describes, on the meta device: it takes
    no memory. None for a kind that transformers does not know, or has no such model of.
    """
    import torch

    whole = _settings(config)
    if whole is None:
        return None
    kind = _class_for_use(whole, use)
    if type(whole) not in kind._model_mapping:
        return None
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(whole)
    return model


def _settings(config: Mapping[str, Any]) -> PretrainedConfig | None:
    """Return a ``config.json`` as transformers' own; None for a kind that it does not know."""
    hide()
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:
        return None
    settings: PretrainedConfig = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    return settings


def _class_for_use(config: PretrainedConfig, use: ModelUse) -> Any:
    """Return the class of transformers that loads the model of ``config`` for ``use``."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    from siirl_dask.models.loading import class_of_config

    if use is ModelUse.SCORES:
        return AutoModelForSequenceClassification
    if use is ModelUse.ENCODES:
        return AutoModel
    return class_of_config(config)
