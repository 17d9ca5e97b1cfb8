"""``config.json`` of models as their folders have it, without what no parameter depends on."""

import json

from hypothesis import strategies as st

QWEN2_5_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN2_5_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
LLAMA_3_1_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 50,
    "n_positions": 32,
}
QWEN2_5_VL_3B = {  # without a text_config, as the hub has it
    "model_type": "qwen2_5_vl",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}
KNOWN = {  # parameters that the models' pages tell
    "Qwen2.5-7B": (QWEN2_5_7B, 7_615_616_512),
    "Qwen2.5-0.5B": (QWEN2_5_HALF_B, 494_032_768),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Llama-3.1-8B": (LLAMA_3_1_8B, 8_030_261_248),
    "Mistral-7B-v0.3": (MISTRAL_7B, 7_248_023_552),
}


OPTIONAL = ("head_dim", "num_key_value_heads", "tie_word_embeddings", "rms_norm_eps", "rope_theta")
OLD_ROPE = (
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 3e3},
)
NEW_ROPE = (
    None,
    {"rope_type": "default", "rope_theta": 7e3},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 7e3},
)


@st.composite
def forms_of_config(draw, families):
    """A small ``config.json`` in a form that some library writes: keys that are not there or null,
    earlier and later names of rotary settings, biases.
    """
    config = {
        "model_type": draw(st.sampled_from(families)),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "intermediate_size": 96,
        "vocab_size": 100,
        "head_dim": draw(st.sampled_from([16, 32])),
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e4,
        "tie_word_embeddings": draw(st.booleans()),
    }
    if config["model_type"] == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    for key in ("attention_bias", "mlp_bias"):
        if draw(st.booleans()):
            config[key] = draw(st.booleans())
    for key, settings in {"rope_scaling": OLD_ROPE, "rope_parameters": NEW_ROPE}.items():
        if draw(st.booleans()):
            config[key] = draw(st.sampled_from(settings))
    if draw(st.booleans()):
        config["text_config"] = None
    for key in draw(st.sets(st.sampled_from(OPTIONAL), max_size=2)):
        if draw(st.booleans()):
            config[key] = None
        else:
            del config[key]
    return config


def write_config(folder, config):
    """Write a folder that has a ``config.json`` and nothing else."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
