import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from siirl_dask.tasks.tiny_model import CHAT_TEMPLATE, VOCABULARY, tiny_model


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "llama"])
def test_the_folder_loads_like_a_real_one(tmp_path, family):
    folder = tiny_model(tmp_path / "model", family=family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.model_type, model.config.head_dim) == (family, 32)
    assert model.config.vocab_size == VOCABULARY
    assert (
        model.generation_config.eos_token_id == AutoTokenizer.from_pretrained(folder).eos_token_id
    )


@pytest.mark.parametrize(
    "text", ["Sort: 2 9 1 4 1 =", " 1 1 2 4 9", "  two\n\n\tlines ", "é ß 漢字 🙂"]
)
def test_a_text_survives_the_saved_tokenizer_with_its_spaces(tmp_path, text):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model(tmp_path / "model", family="qwen2"))
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    assert tokenizer.decode(tokens) == text


def test_the_seed_alone_decides_the_weights(tmp_path):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    files = [
        tiny_model(tmp_path / name, seed=seed) / "model.safetensors"
        for name, seed in [("a", 1), ("b", 1), ("c", 2)]
    ]
    first, same, other = (file.read_bytes() for file in files)
    assert first == same != other
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_chat_template_is_saved_with_it(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(
        tiny_model(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    )
    assert json.dumps(CHAT_TEMPLATE) == json.dumps(tokenizer.chat_template)
