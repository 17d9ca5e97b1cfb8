"""Which models the backend megatron knows, and what must divide them. Imports no megatron-core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from siirl_dask.config import MegatronConfig, TrainerConfig
from siirl_dask.errors import ConfigError, counted
from siirl_dask.models.architecture import as_transformers_reads, read_config, understood

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
# as Qwen's folders name them, and as transformers 5 writes them
_EXPERTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class ExpertMixture:
    """Sizes of layers whose feed-forward part is a mixture of experts."""

    experts: int
    chosen: int
    """Experts that compute each token."""
    width: int
    """Width of an expert."""
    normed: bool
    """Whether a token's weights of its experts sum up to 1."""
    dense_layers: frozenset[int]
    """Layers that have an MLP instead."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
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
    mixture: ExpertMixture | None = None
    """Experts of the layers; None: all have an MLP."""

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        if self.mixture is None:
            return False
        return layer not in self.mixture.dense_layers


def sizes_of(config: Mapping[str, Any], path: str) -> LayerSizes:
    """Read a model's sizes from its ``config.json``. ConfigError for what the backend megatron
    does not compute.
    """
    kind = config.get("model_type")
    subject = f"trainer.backend=megatron with model.path={path!r}"
    if kind not in _FAMILIES:
        raise ConfigError(
            f"{subject}: model_type={kind!r} is not among {', '.join(_FAMILIES)}, which it knows; "
            "take trainer.backend=fsdp"
        )
    config = understood(path, config, as_transformers_reads)
    rope = config["rope_parameters"]
    unknown = {
        "rope_parameters": rope["rope_type"] != "default" and rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0
        and rope["partial_rotary_factor"],
        "use_sliding_window": config.get("use_sliding_window"),
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": config.get("mlp_bias"),
        "hidden_act": config.get("hidden_act", "silu") != "silu" and config["hidden_act"],
    }
    found = [f"{key}={value}" for key, value in unknown.items() if value]
    if found:
        raise ConfigError(
            f"{subject}: it does not compute {', '.join(found)}; take trainer.backend=fsdp"
        )
    return understood(path, config, _sizes)


def _sizes(config: Mapping[str, Any]) -> LayerSizes:
    """Read the sizes of a kind that is known."""
    kind = config["model_type"]
    rope = config["rope_parameters"]
    heads = int(config["num_attention_heads"])
    hidden = int(config["hidden_size"])
    default = 128
    if kind != "qwen3":
        default = hidden // heads
    return LayerSizes(
        layers=int(config["num_hidden_layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config["num_key_value_heads"]),
        head_dim=int(config.get("head_dim") or default),
        intermediate=int(config["intermediate_size"]),
        vocabulary=int(config["vocab_size"]),
        epsilon=float(config["rms_norm_eps"]),
        rope_base=float(rope["rope_theta"]),
        tied=bool(config["tie_word_embeddings"]),
        normed_heads=kind in ("qwen3", "qwen3_moe"),
        qkv_bias=kind == "qwen2",
        mixture=_mixture(config) if kind == "qwen3_moe" else None,
    )


def _mixture(config: Mapping[str, Any]) -> ExpertMixture:
    """Read what transformers reads for a Qwen3-MoE, with its rule for layers that have no
    experts.
    """
    layers = range(int(config["num_hidden_layers"]))
    step = int(config.get("decoder_sparse_step", 1))
    without = set(config.get("mlp_only_layers") or ())
    return ExpertMixture(
        experts=int(next(config[name] for name in _EXPERTS if name in config)),
        chosen=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        normed=bool(config.get("norm_topk_prob", False)),
        dense_layers=frozenset(layer for layer in layers if layer in without or (layer + 1) % step),
    )


def check_division(megatron: MegatronConfig, sizes: LayerSizes, path: str) -> None:
    """Check that ranks can divide layers, heads, widths and vocabulary evenly. ConfigError if
    they cannot.
    """
    tensor = megatron.tensor_parallel
    pipeline = megatron.pipeline_parallel
    shared = {
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocabulary,
    }
    if sizes.mixture is None or sizes.mixture.dense_layers:
        shared["intermediate_size"] = sizes.intermediate
    for key, width in shared.items():
        if width % tensor:
            raise ConfigError(
                f"trainer.megatron.tensor_parallel={tensor}: expected a divisor of {key}={width} "
                f"of {path!r}"
            )
    context = megatron.context_parallel
    heads = sizes.heads // tensor
    if heads % context:
        raise ConfigError(
            f"trainer.megatron.context_parallel={context}: expected a divisor of the {heads} heads "
            "that each of "
            f"tensor_parallel={tensor} has of num_attention_heads={sizes.heads} of {path!r}"
        )
    if sizes.layers % (pipeline * megatron.virtual_pipeline):
        runs = ""
        if megatron.virtual_pipeline > 1:
            runs = f" times virtual_pipeline={megatron.virtual_pipeline}"
        raise ConfigError(
            f"trainer.megatron.pipeline_parallel={pipeline}{runs}: expected a divisor of "
            f"num_hidden_layers={sizes.layers} of {path!r}"
        )
    _check_experts(megatron, sizes.mixture, path)


def _check_experts(megatron: MegatronConfig, mixture: ExpertMixture | None, path: str) -> None:
    if mixture is None:
        if megatron.expert_parallel is not None:
            raise ConfigError(
                f"trainer.megatron.expert_parallel={megatron.expert_parallel}: {path!r} has no "
                "experts; leave it out"
            )
    elif mixture.experts % megatron.experts_over:
        option = "expert_parallel"
        if megatron.expert_parallel is None:
            option = "tensor_parallel"
        raise ConfigError(
            f"trainer.megatron.{option}={megatron.experts_over}: expected a divisor of the "
            f"{mixture.experts} experts "
            f"of each layer of {path!r}, which are spread over as many ranks"
        )


def check_ranks(megatron: MegatronConfig, workers: int) -> None:
    """Check that replicas, and the ranks that share experts, divide a role's workers.
    ConfigError if they do not.
    """
    if workers % megatron.ranks:
        context = ""
        if megatron.context_parallel > 1:
            context = f"context_parallel={megatron.context_parallel}, "
        raise ConfigError(
            f"trainer.megatron.tensor_parallel={megatron.tensor_parallel}, "
            f"{context}pipeline_parallel={megatron.pipeline_parallel}: a replica has "
            f"{megatron.ranks} ranks, expected a divisor of the role's {counted(workers, 'worker')}"
        )
    of_stage = workers // megatron.pipeline_parallel
    if of_stage % megatron.experts_over:
        raise ConfigError(
            f"trainer.megatron.expert_parallel={megatron.expert_parallel}: expected a divisor of "
            f"the {of_stage} ranks "
            f"that have the same layers, of the role's {counted(workers, 'worker')}"
        )


def check_model(trainer: TrainerConfig, path: str) -> None:
    """Check the model in ``path``, if it is here. ConfigError for one that cannot be built or
    divided.
    """
    config = read_config(path)
    if config is not None:
        check_division(trainer.megatron, sizes_of(config, path), path)
