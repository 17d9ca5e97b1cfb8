"""Widths of a model from its config."""

import json

import pytest
import torch
from safetensors.torch import save
from siirl_storage import open_fs, write_atomic

from siirl_dask.errors import ConfigError
from siirl_dask.models.shapes import Widths, read_widths, weight_shapes
from siirl_dask.tasks.tiny_model import tiny_model

GEMMA = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "intermediate_size": 96},
}


def widths_of(folder, text):
    (folder / "config.json").write_text(text)
    return read_widths(str(folder))


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 50},
         Widths(6, 2, 96, 50)),
        ({"model_type": "never heard of", "vocab_size": 50}, Widths(None, None, None, 50)),
        ({"model_type": "gpt2", "n_head": 6, "vocab_size": 50}, Widths(6, 6, 4 * 768, 50)),
        ({"model_type": "llama", "num_attention_heads": 8, "intermediate_size": 96, "vocab_size": 50},
         Widths(8, 8, 96, 50)),
        (GEMMA, Widths(8, 4, 96, 262208)),
    ],
    ids=["all", "unknown", "other names", "left out", "nested, left out"],
)  # fmt: skip
def test_widths_come_from_the_config_or_transformers_defaults(tmp_path, config, widths):
    assert widths_of(tmp_path, json.dumps(config)) == widths


@pytest.mark.parametrize("base", ["", "memory://shapes"])
def test_a_folders_name_leads_to_no_other_model(base, tmp_path):
    fs, folder = open_fs(base or str(tmp_path))
    for name, size in (("model[1]*?", 3), ("model1XX", 7)):
        weights = save({"embed.weight": torch.zeros(size, 2)})
        write_atomic(fs, f"{folder}/{name}/model.safetensors", weights)
        write_atomic(fs, f"{folder}/{name}/config.json", b"{}")
    assert weight_shapes(f"{base or tmp_path}/model[1]*?") == {"embed.weight": (3, 2)}
    assert weight_shapes(str(tmp_path / "nothing")) == {}


def test_a_tiny_model_has_all_widths_and_an_empty_folder_none(tmp_path):
    model = tiny_model(tmp_path / "model", heads=4, kv_heads=2, intermediate=96)
    assert read_widths(str(model)) == Widths(4, 2, 96, 264)
    assert read_widths(str(tmp_path)) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        "{",
        '{"text_config": 5}',
        '{"model_type": ["x"]}',
        '{"model_type": "llama", "num_attention_heads": 7}',
    ],
)
def test_a_damaged_config_is_refused_with_its_folder(tmp_path, text):
    with pytest.raises(ConfigError, match=r"model\.path='.*': its config\.json cannot be read"):
        widths_of(tmp_path, text)
