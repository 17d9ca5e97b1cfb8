"""Families of models as tiny ones, with random weights as large as trained ones, and what is
known of each.
"""

from dataclasses import dataclass, field

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from siirl_dask.models.loading import correct_modules
from siirl_dask.tasks.tiny_model import tiny_tokenizer
from siirl_dask.tasks.vocabulary import VOCABULARY

WINDOW = 8
SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024,
}  # fmt: skip
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 257}
WINDOWED = {"sliding_window": WINDOW}
IN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}  # fmt: skip
STATE = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
GPT = {"n_positions": 1024, "n_embd": 32, "n_layer": 2, "n_head": 4}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}


@dataclass(frozen=True)
class Family:
    """A family, or a kind of it, as a tiny model."""

    kind: str
    """The ``model_type`` of its config.json."""
    settings: dict = field(default_factory=dict)
    """Settings of its config, beside the sizes that most have."""
    own_sizes: bool = False
    """Whether ``settings`` has all sizes, under names of its own."""
    rows: str = "packed"
    """How the trainer computes rows."""
    loop: str = "own"
    """Whose loop the transformers engine samples with; ``generate`` is transformers' own."""
    lora: bool = True
    """Whether adapters can be trained."""
    scale: float = 1.0
    """Factor of weights, for steep models, in which rounding alone exceeds the bounds."""
    attention: str = "eager"
    """Attention of transformers that computes what is expected."""


FAMILIES = {
    "llama": Family(
        "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama3 rotary": Family("llama", {"rope_parameters": LLAMA3}),
    "yarn rotary": Family("llama", {"rope_parameters": YARN}),
    "qwen2": Family("qwen2", IN_WINDOW),
    "qwen3": Family("qwen3", {"head_dim": 16, **IN_WINDOW}),
    "qwen2_moe": Family("qwen2_moe", {**SHARED_EXPERT, **IN_WINDOW}),
    "qwen3_moe": Family("qwen3_moe", {"head_dim": 16, **EXPERTS}),
    "qwen3_next": Family("qwen3_next", {"head_dim": 16, **SHARED_EXPERT, **DELTA}, scale=0.7),
    "qwen3_5_text": Family("qwen3_5_text", {"head_dim": 16, **DELTA}, scale=0.7),
    "qwen3_5_moe_text": Family(
        "qwen3_5_moe_text", {"head_dim": 16, **SHARED_EXPERT, **DELTA}, scale=0.7
    ),
    "mistral": Family("mistral", WINDOWED),
    "ministral": Family("ministral", {"head_dim": 8, "num_hidden_layers": 4, **WINDOWED}),
    "ministral3": Family("ministral3", {"head_dim": 8, "sliding_window": None}),
    "mixtral": Family("mixtral", {**WINDOWED, **LOCAL}),
    "phi": Family("phi", {"partial_rotary_factor": 0.5}),
    "phi3": Family("phi3", WINDOWED),
    "phimoe": Family("phimoe", {**WINDOWED, **LOCAL}),
    "gemma": Family("gemma", {"head_dim": 16}),
    "gemma2": Family("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWED}),
    "gemma3_text": Family(
        "gemma3_text",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6, **WINDOWED},
    ),
    "gemma3n_text": Family(
        "gemma3n_text",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": None,
            **WINDOWED,
        },
    ),
    "gemma4_text": Family(
        "gemma4_text",
        {"head_dim": 16, "vocab_size_per_layer_input": VOCABULARY, **WINDOWED},
        scale=0.7,
    ),
    "vaultgemma": Family("vaultgemma", {"head_dim": 8, **WINDOWED}),
    "gpt_oss": Family("gpt_oss", {"head_dim": 16, **WINDOWED, **LOCAL}),
    "mimo_v2_flash": Family(
        "mimo_v2_flash",
        {
            "head_dim": 8,
            "v_head_dim": 8,
            **WINDOWED,
            **ROUTED,
        },
    ),
    "deepseek_v2": Family("deepseek_v2", {**ROUTED, **LATENT, "q_lora_rank": None}),
    "deepseek_v3": Family("deepseek_v3", {**ROUTED, **LATENT}),
    "glm4": Family("glm4", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "glm4_moe": Family("glm4_moe", {"head_dim": 16, **ROUTED}),
    "ernie4_5": Family("ernie4_5", {"head_dim": 8}),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    ),
    "afmoe": Family("afmoe", {"head_dim": 8, "num_hidden_layers": 4, **WINDOWED, **EXPERTS}),
    "minimax": Family("minimax", {**LOCAL, "head_dim": 8, "block_size": 8}, loop="generate"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", {"num_hidden_layers": 4, **WINDOWED}),
    "olmoe": Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo_hybrid": Family("olmo_hybrid", DELTA, scale=0.7),
    "smollm3": Family("smollm3", {"no_rope_layer_interval": 2, **IN_WINDOW}),
    "granite": Family(
        "granite",
        {
            "logits_scaling": 8.0,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.015625,
        },
    ),
    "granitemoe": Family("granitemoe", LOCAL),
    "granite_swa": Family("granite_swa", WINDOWED),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_hidden_layers": 3,
            "shared_intermediate_size": 32,
            "logits_scaling": 8.0,
            **STATE,
            **LOCAL,
        },
    ),
    "cohere": Family("cohere"),
    "cohere2": Family("cohere2", {"num_hidden_layers": 4, **WINDOWED}),
    "lfm2": Family("lfm2", {"num_hidden_layers": 4, "full_attn_idxs": [2]}),
    "lfm2_moe": Family(
        "lfm2_moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            **EXPERTS,
        },
    ),
    "mamba": Family("mamba"),
    "falcon_mamba": Family("falcon_mamba"),
    "mamba2": Family(
        "mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 16}
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "layers_block_type": [
                "linear_attention",
                "mlp",
                "full_attention",
                "moe",
                "linear_attention",
            ],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_n_groups": 1,
            "mamba_d_state": 8,
            "mamba_chunk_size": 16,
        },
    ),
    "bamba": Family("bamba", {"attn_layer_indices": [1], **STATE}),
    "zamba2": Family(
        "zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "chunk_size": 16,
            "use_mem_rope": True,
        },
    ),
    "kimi_linear": Family(
        "kimi_linear",
        {
            **LATENT,
            "q_lora_rank": None,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        scale=0.7,
    ),
    "longcat_flash": Family(
        "longcat_flash",
        {
            **LATENT,
            "num_layers": 2,
            "head_dim": 8,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 16,
            "routed_scaling_factor": 1.0,
        },
    ),
    "jamba": Family(
        "jamba",
        {
            "num_hidden_layers": 4,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "exaone4": Family(
        "exaone4", {"sliding_window_pattern": 2, "head_dim": 8, "num_hidden_layers": 4, **WINDOWED}
    ),
    "cwm": Family("cwm", {"head_dim": 8, **WINDOWED}),
    "seed_oss": Family("seed_oss", {"head_dim": 8}),
    "hunyuan_v1_dense": Family("hunyuan_v1_dense", {"head_dim": 8}),
    "apertus": Family("apertus"),
    "arcee": Family("arcee"),
    "helium": Family("helium", {"head_dim": 8}),
    "nanochat": Family("nanochat", {"head_dim": 8}),
    "starcoder2": Family("starcoder2", WINDOWED),
    "stablelm": Family("stablelm", {"partial_rotary_factor": 0.25}, loop="generate"),
    "nemotron": Family("nemotron", {"head_dim": 8}, loop="generate"),
    "diffllama": Family("diffllama", loop="generate"),
    "jetmoe": Family("jetmoe", {"kv_channels": 8, **LOCAL}),
    "bitnet": Family("bitnet"),
    "gpt2": Family("gpt2", GPT, own_sizes=True, lora=False),
    # all heads have keys of their own: vLLM goes by the key, and would take others
    "gpt_neox": Family("gpt_neox", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
    "opt": Family("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "llama4_text": Family(
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": WINDOW,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "moe_layers": None,
        },
        rows="padded",
        loop="generate",
    ),
    "doge": Family("doge", WINDOWED, rows="padded", loop="generate"),
    "modernbert-decoder": Family(
        "modernbert-decoder", {"local_attention": WINDOW, "num_hidden_layers": 4}, rows="padded"
    ),
    "bloom": Family(
        "bloom",
        {"n_layer": 2, "n_head": 4, "hidden_size": 32},
        own_sizes=True,
        rows="padded",
        loop="generate",
    ),
    "mpt": Family(
        "mpt",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 1024},
        own_sizes=True,
        rows="padded",
        loop="generate",
    ),
    "falcon": Family(
        "falcon",
        {"alibi": False, "new_decoder_architecture": True},
        rows="padded",
        loop="generate",
        lora=False,
    ),
    "falcon alibi": Family(
        "falcon",
        {"alibi": True, "new_decoder_architecture": False, "multi_query": True},
        rows="padded",
        loop="generate",
        lora=False,
        attention="sdpa",  # transformers' eager attention counts the bias twice
    ),
    "gptj": Family(
        "gptj", {**GPT, "rotary_dim": 4}, own_sizes=True, rows="padded", loop="generate"
    ),
    "codegen": Family(
        "codegen", {**GPT, "rotary_dim": 4}, own_sizes=True, rows="padded", loop="generate"
    ),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "hidden_size": 32,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
            "max_position_embeddings": 1024,
        },
        own_sizes=True,
        rows="padded",
        loop="generate",
    ),
    "xglm": Family(
        "xglm",
        {
            "d_model": 32,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 1024,
        },
        own_sizes=True,
        rows="padded",
        loop="generate",
    ),
}


REFUSED = {
    "recurrent_gemma": Family(
        "recurrent_gemma", {"attention_window_size": WINDOW, "num_hidden_layers": 3}
    )
}
"""Families whose log-probs no layout of rows gives."""
CHOSEN = 96
CHOOSING = {
    "minimax_m3_vl_text": Family(
        "minimax_m3_vl_text",
        {
            **LOCAL, "head_dim": 16, "index_block_size": 8, "index_topk_blocks": CHOSEN // 8, "index_n_heads": 2,
            "index_head_dim": 16, "index_local_blocks": 1, "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
    ),
    "deepseek_v32": Family(
        "deepseek_v32",
        {
            **LATENT, **ROUTED, "index_topk": CHOSEN, "index_n_heads": 2, "index_head_dim": 16,
            "mlp_layer_types": ["dense", "sparse"],
        },
        rows="padded",
    ),
}  # fmt: skip
"""Families whose tokens see ``CHOSEN`` of those before them."""


def written(folder, name):
    """Write the model of a family, and return it; its attention is far from uniform, and no weight
    is 0 or 1, so that each has a part in every log-prob.
    """
    family = {**FAMILIES, **REFUSED, **CHOOSING}[name]
    sizes = TOKENS if family.own_sizes else {**TOKENS, **SIZES}
    config = CONFIG_MAPPING[family.kind](**{**sizes, **family.settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=family.attention).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim >= 2:
                parameter.copy_(noise * family.scale * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.1)
        for part, buffer in model.named_buffers():
            if part.endswith(("correction_bias", "expert_bias")):
                buffer.copy_(torch.randn(buffer.shape, generator=draw) * 0.1)
    correct_modules(model)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model
