"""Families of models as tiny ones that vLLM's kernels for CPUs take, and what it does with each."""

import json
from dataclasses import replace

from tests.training import families

SIZES = {"hidden_size": 128, "intermediate_size": 128}
WIDTHS = {
    "hidden_size": 128, "head_dim": 32, "v_head_dim": 32, "kv_channels": 32, "n_embd": 128, "ffn_dim": 128,
    "word_embed_proj_dim": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "query_pre_attn_scalar": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
"""Settings that name a width, and the least that its kernels take."""
LATENT = {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}
OTHERS = {"deepseek_v2": {**LATENT, "q_lora_rank": None}, "deepseek_v3": LATENT}
IN_FILES = {
    "lfm2": {
        "conv_dim": 128,
        "conv_dim_out": 128,
        "block_dim": 128,
        "block_ff_dim": 128,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "layernorm_epsilon": 1e-5,
        "sliding_window_size": families.WINDOW,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "add_swa_attention_sink_bias": True,
        "rope_theta": 5_000_000,
        "swa_rope_theta": 10_000,
        "partial_rotary_factor": 0.334,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "deepseek_v2": {"topk_method": "greedy", "scoring_func": "softmax"},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}
"""Keys of published config.json that vLLM reads and transformers does not write."""
EQUAL = (
    "llama", "llama3 rotary", "qwen3_moe", "mistral", "ministral", "ministral3", "mixtral", "phi", "phi3", "gemma",
    "gemma2", "gemma3_text", "gemma4_text", "vaultgemma", "nanochat", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4",
    "glm4_moe", "ernie4_5", "olmo", "olmo2", "olmo3", "olmoe", "smollm3", "granite", "granitemoe", "granite_swa",
    "cohere", "lfm2", "lfm2_moe", "exaone4", "cwm", "seed_oss", "hunyuan_v1_dense", "arcee", "helium", "starcoder2",
    "stablelm", "nemotron", "bitnet", "gpt2", "gpt_neox", "opt", "falcon", "gptj", "mimo_v2_flash",
)  # fmt: skip
"""Families whose log-probs are the trainer's in float32, before and after new weights."""
REFUSED = ("jetmoe", "doge", "gemma3n_text", "ernie4_5_moe", "cohere2", "qwen2_moe")
"""Families whose log-probs are others from the start, and which are refused."""


def of_cpus(name):
    """The family with widths that vLLM's kernels take."""
    tried = families.FAMILIES[name]
    settings = {key: WIDTHS.get(key, value) for key, value in tried.settings.items()}
    return replace(tried, settings=settings | OTHERS.get(name, {}))


def written_for_vllm(folder, name, monkeypatch, **settings):
    """Write the model of a family, with more ``settings``; its files say what published ones do."""
    for key, size in SIZES.items():
        monkeypatch.setitem(families.SIZES, key, size)
    family = of_cpus(name)
    tried = replace(family, settings={**family.settings, **settings})
    monkeypatch.setitem(families.FAMILIES, name, tried)
    folder.mkdir(exist_ok=True)
    families.written(folder, name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | IN_FILES.get(name, {})))
