"""Every family of models is scored as plain transformers scores it, row by row, or is refused when it is built."""

import re
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from siirl_dask.config import ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.rollout.decoding import use_decoding
from siirl_dask.tasks.tiny_model import VOCABULARY, tiny_tokenizer
from siirl_dask.testing.reference_model import response_logprobs
from siirl_dask.testing.rows import random_rows, split_rows
from siirl_dask.training import build_trainer
from tests.settings import trainer_config

ROOT = Path(__file__).parents[2]
WINDOW = 8
LENGTHS = [(5, 7), (5, 3), (9, 30), (2, 1), (17, 23), (3, 40)]  # most rows are longer than the windows
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "pad_token_id": 256, "bos_token_id": 257, "eos_token_id": 257,
}  # fmt: skip
IN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
RIGHT = {
    "llama": {"attention_bias": True, "tie_word_embeddings": True},
    "qwen2": IN_WINDOW,
    "qwen3": {"head_dim": 16, **IN_WINDOW},
    "qwen3_moe": {"head_dim": 16, **EXPERTS},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "mistral": {"sliding_window": WINDOW},
    "mixtral": {"sliding_window": WINDOW, **LOCAL},
    "ministral": {"sliding_window": WINDOW, "head_dim": 8},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": WINDOW},
    "gemma": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "gemma4_text": {"head_dim": 16, "sliding_window": WINDOW, "vocab_size_per_layer_input": VOCABULARY},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "num_hidden_layers": 4},
    "smollm3": {"no_rope_layer_interval": 2, **IN_WINDOW},
    "starcoder2": {"sliding_window": WINDOW},
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4_moe": {"head_dim": 16, **ROUTED},
    "deepseek_v3": {**ROUTED, **LATENT, "num_key_value_heads": 4},
    "exaone4": {"sliding_window": WINDOW, "sliding_window_pattern": 2, "head_dim": 8, "num_hidden_layers": 4},
    "cwm": {"sliding_window": WINDOW, "head_dim": 8},
    "ernie4_5": {"head_dim": 8},
    "gpt_neox": {"rotary_pct": 0.25},
    "seed_oss": {"head_dim": 8},
}
REFUSED = {
    "phimoe": {"sliding_window": WINDOW, **LOCAL},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16, **IN_WINDOW},
    "doge": {"sliding_window": WINDOW},
    "llama4_text": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": WINDOW,
        "num_hidden_layers": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2, "moe_layers": None,
    },
    "modernbert-decoder": {"local_attention": WINDOW, "num_hidden_layers": 4},
    "gemma2": {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gpt_oss": {"head_dim": 16, "sliding_window": WINDOW, **LOCAL},
    "cohere": {},
    "granite": {"logits_scaling": 8.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625},
    "mamba": {},
    "lfm2": {"num_hidden_layers": 4, "full_attn_idxs": [2]},
    "qwen3_next": {"head_dim": 16, "num_hidden_layers": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **LINEAR},
    "qwen3_5_text": {"head_dim": 16, "num_hidden_layers": 4, **LINEAR},
}  # fmt: skip
QUICK = ("qwen2", "mistral", "gemma3_text", "phimoe", "qwen2_moe", "doge", "llama4_text")


def test_the_page_has_every_family_in_its_table():
    right, refused = (ROOT / "docs" / "models.md").read_text().split("| refused when")
    for families, table in ((RIGHT, right), (REFUSED, refused)):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
        assert set(re.findall(r"`([\w-]+)`", " ".join(rows))) - {"use_sliding_window"} == set(families)


def marked(families):
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(name, given, marks=marks[name in QUICK], id=name) for name, given in families.items()]


def written(folder, family, given):
    """A model whose weights are as large as trained ones, so that attention is far from uniform."""
    config = CONFIG_MAPPING[family](**SIZES | given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def trainer_of(folder):
    model = ModelConfig(path=str(folder))
    return build_trainer(Device("w0"), Rank(), model=model, trainer=trainer_config(), rollout=RolloutConfig())


@pytest.mark.parametrize(("family", "given"), marked(RIGHT))
def test_packed_rows_are_scored_as_plain_transformers_scores_each_alone(family, given, tmp_path):
    model = written(tmp_path, family, given)
    rows = random_rows(LENGTHS)
    with torch.no_grad():
        expected = [response_logprobs(model, row[:n].tolist(), row[n:].tolist()) for row, n in split_rows(rows)]
    assert (trainer_of(tmp_path).logprobs(rows).logprobs - torch.cat(expected)).abs().max() < 1e-5
    assert use_decoding(model)


@pytest.mark.parametrize(("family", "given"), marked(REFUSED))
def test_what_cannot_be_scored_so_is_refused_by_its_name(family, given, tmp_path):
    model = written(tmp_path, family, given)
    with pytest.raises(ConfigError, match=type(model).__name__):
        trainer_of(tmp_path)


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe", "doge"])
def test_a_window_that_only_a_mask_knows_is_left_to_generate(family, tmp_path):
    assert not use_decoding(written(tmp_path, family, REFUSED[family]))
