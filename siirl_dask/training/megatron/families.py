"""Which models the backend megatron knows, and what must divide them. Imports neither torch nor megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import MegatronConfig, TrainerConfig
from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import read_config

_FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a decoder that megatron-core builds."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    epsilon: float
    rope_base: float
    tied: bool
    normed_heads: bool
    """Whether queries and keys are normalised head by head, as in Qwen3."""
    qkv_bias: bool
    """Whether queries, keys and values have a bias, as in Qwen2."""


def sizes_of(config: Mapping[str, Any], path: str) -> Sizes:
    """Read a model's sizes from its ``config.json``. ConfigError for what the backend megatron does not compute."""
    kind = config.get("model_type")
    subject = f"trainer.backend=megatron with model.path={path!r}"
    if kind not in _FAMILIES:
        raise ConfigError(
            f"{subject}: model_type={kind!r} is not among {', '.join(_FAMILIES)}, which it knows; take "
            "trainer.backend=fsdp"
        )
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    unknown = {
        "rope_parameters": rope.get("rope_type", rope.get("type", "default")) != "default" and rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0 and rope["partial_rotary_factor"],
        "use_sliding_window": config.get("use_sliding_window"),
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
    }
    if found := [f"{key}={value}" for key, value in unknown.items() if value]:
        raise ConfigError(f"{subject}: it does not compute {', '.join(found)}; take trainer.backend=fsdp")
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    default = 128 if kind == "qwen3" else hidden // heads
    return Sizes(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or default),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope_base=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        tied=bool(config.get("tie_word_embeddings", False)),
        normed_heads=kind == "qwen3",
        qkv_bias=kind == "qwen2",
    )


def check_division(megatron: MegatronConfig, sizes: Sizes, path: str) -> None:
    """Check that ranks can divide layers, heads, widths and vocabulary evenly. ConfigError if they cannot."""
    tensor, pipeline = megatron.tensor_parallel, megatron.pipeline_parallel
    shared = {
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "intermediate_size": sizes.intermediate,
        "vocab_size": sizes.vocabulary,
    }
    for key, width in shared.items():
        if width % tensor:
            raise ConfigError(
                f"trainer.megatron.tensor_parallel={tensor}: expected a divisor of {key}={width} of {path!r}"
            )
    if sizes.layers % pipeline:
        raise ConfigError(
            f"trainer.megatron.pipeline_parallel={pipeline}: expected a divisor of num_hidden_layers={sizes.layers} "
            f"of {path!r}"
        )


def check_model(trainer: TrainerConfig, path: str) -> None:
    """Check the model in ``path``, if it is here. ConfigError for one that cannot be built or divided."""
    if (config := read_config(path)) is not None:
        check_division(trainer.megatron, sizes_of(config, path), path)
