"""A config.json alone gives every parameter of a model: the same as transformers makes, and as
the files have.
"""

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from siirl_dask.errors import ConfigError
from siirl_dask.models.architecture import Architecture, read_architecture, shapes_by_config
from siirl_dask.models.shapes import count_parameters, weight_shapes
from siirl_dask.models.weight_files import check_weights
from siirl_dask.tasks.tiny_model import tiny_model
from tests.models.configs import (
    GPT2,
    KNOWN,
    LLAMA_3_1_8B,
    MISTRAL_7B,
    QWEN2_5_7B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    forms_of_config,
    write_config,
)


def by_transformers(config):
    config = deepcopy(config)  # transformers writes defaults into its rotary settings
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("model", KNOWN)
def test_known_models_have_the_parameters_that_their_pages_tell(tmp_path, model):
    config, parameters = KNOWN[model]
    folder = str(write_config(tmp_path / "model", config))
    assert count_parameters(folder).total == parameters
    assert shapes_by_config(folder) == by_transformers(config)


VARIANTS = {
    "llama with biases": {**LLAMA_3_1_8B, "attention_bias": True, "mlp_bias": True},
    "tied llama with a head's width": {**LLAMA_3_1_8B, "tie_word_embeddings": True, "head_dim": 64},
    "tied qwen3": {**QWEN3_8B, "tie_word_embeddings": True, "attention_bias": True},
    "qwen3 with its own width of a head": {
        key: size for key, size in QWEN3_8B.items() if key != "head_dim"
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_biases_ties_and_widths_of_heads_count(tmp_path, variant):
    config = {**VARIANTS[variant], "num_hidden_layers": 2}
    assert shapes_by_config(str(write_config(tmp_path, config))) == by_transformers(config)


@given(config=forms_of_config(("llama", "mistral", "qwen2", "qwen3")))
def test_any_form_of_a_config_is_read_as_transformers_reads_it_or_refused(tmp_path_factory, config):
    folder = str(write_config(tmp_path_factory.mktemp("form") / "model", config))
    try:
        expected = by_transformers(config)
    except Exception:  # transformers raises many kinds of errors for a config that it refuses
        with pytest.raises(ConfigError, match=r"its config\.json cannot be read"):
            check_weights(folder)
        return
    assert shapes_by_config(folder) == expected
    found = read_architecture(folder)
    projections = [f"model.layers.0.self_attn.{name}_proj.weight" for name in ("q", "k")]
    assert [found.queries, found.keys] == [expected[name][0] for name in projections]
    assert found.tied is ("lm_head.weight" not in expected)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_config_of_a_real_folder_gives_what_its_weight_files_have(tmp_path, family, tied):
    folder = str(tiny_model(tmp_path, family=family, tied=tied, heads=4, kv_heads=2))
    assert shapes_by_config(folder) == weight_shapes(folder)


def test_qwen_7b_is_read_as_its_page_says(tmp_path):
    found = read_architecture(str(write_config(tmp_path, QWEN2_5_7B)))
    assert found == Architecture(
        layers=28,
        hidden=3584,
        heads=28,
        kv_heads=4,
        head_dim=128,
        intermediate=18944,
        vocabulary=152064,
    )
    assert (found.queries, found.keys) == (3584, 512)


def test_experts_are_as_wide_as_their_config_says_or_as_an_mlp_like_mixtrals(tmp_path):
    own = read_architecture(str(write_config(tmp_path / "qwen", QWEN3_30B_A3B)))
    assert (own.chosen, own.expert, own.inner) == (8, 768, 8 * 768)
    like_mlp = {
        **MISTRAL_7B,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    mixtral = read_architecture(str(write_config(tmp_path / "mixtral", like_mlp)))
    assert (mixtral.chosen, mixtral.inner) == (2, 2 * 14336)
    assert read_architecture(str(write_config(tmp_path / "mistral", MISTRAL_7B))).inner == 14336


def test_other_families_are_asked_of_transformers(tmp_path):
    folder = str(write_config(tmp_path / "gpt2", GPT2))
    assert shapes_by_config(folder) == by_transformers(GPT2)
    found = read_architecture(folder)
    assert (found.layers, found.hidden, found.heads, found.kv_heads, found.intermediate) == (
        2,
        64,
        2,
        2,
        256,
    )
    encoder = {
        "model_type": "vit",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    assert shapes_by_config(str(write_config(tmp_path / "vit", encoder))) == {}
    assert read_architecture(str(tmp_path / "vit")) is None
    unknown = str(write_config(tmp_path / "unknown", {"model_type": "never heard of"}))
    assert (shapes_by_config(unknown), read_architecture(unknown)) == ({}, None)
    assert (shapes_by_config(str(tmp_path)), read_architecture(str(tmp_path))) == ({}, None)


@pytest.mark.parametrize(
    "damage", [{"hidden_size": "wide"}, {"num_hidden_layers": -1}, {"vocab_size": [1]}]
)
def test_a_config_with_impossible_sizes_is_refused_with_its_folder(tmp_path, damage):
    folder = str(write_config(tmp_path, {**QWEN2_5_7B, **damage}))
    for read in (read_architecture, count_parameters):
        with pytest.raises(
            ConfigError,
            match=r"model\.path='.*': its config\.json cannot be read: .*expected a whole",
        ):
            read(folder)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8-sig")
    with pytest.raises(ConfigError, match="Unexpected UTF-8 BOM"):
        read_architecture(folder)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="a list where an object was expected"):
        read_architecture(folder)


def test_a_mixture_with_names_of_its_own_is_sized_as_transformers_names_it(tmp_path):
    """LongCat-Flash as it is published: two halves of a layer count as layers."""
    config = {
        "model_type": "longcat_flash",
        "hidden_size": 6144,
        "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048,
        "num_layers": 28,
        "num_attention_heads": 64,
        "n_routed_experts": 512,
        "zero_expert_num": 256,
        "moe_topk": 12,
        "vocab_size": 131072,
    }
    found = read_architecture(str(write_config(tmp_path, config)))
    assert (found.layers, found.intermediate) == (56, 12288)
    assert (found.chosen, found.expert, found.inner) == (12, 2048, 12 * 2048)
