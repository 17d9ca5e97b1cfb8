"""A run whose rows would change each other's rotary frequencies is refused before it starts."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.errors import ConfigError
from siirl_dask.models.rotary import check_rows_are_alike
from siirl_dask.tasks.tiny_model import VOCABULARY, tiny_model
from tests.conftest import digits_overrides

LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0, 2.0, 4.0, 8.0, 16.0, 24.0, 32.0, 48.0]}
ORIGINAL = "original_max_position_embeddings"
CONFIGS = {
    "phi3 of transformers 4": {"rope_scaling": {"type": "longrope", **LONG}, ORIGINAL: 32},
    "phi3 of 2024": {"rope_scaling": {"type": "su", **LONG}, ORIGINAL: 32},
    "phi3 of transformers 5": {"rope_parameters": {"rope_type": "longrope", ORIGINAL: 32, **LONG}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32},
    "a decoder that sees images": {"text_config": {"rope_scaling": {"type": "longrope"}, ORIGINAL: 32}},
    "one kind of layers": {"rope_parameters": {"full_attention": {"rope_type": "longrope", ORIGINAL: 32}}},
}
ALIKE = [
    {"rope_parameters": {"rope_type": "llama3", ORIGINAL: 32}},
    {"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 32}},
    {"rope_scaling": None, "rope_theta": 1000000.0},
    {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
]


def written(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096} | config))
    return str(folder)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_rows_beyond_the_original_context_are_refused_and_others_are_not(config, tmp_path):
    path = written(tmp_path, config)
    check_rows_are_alike(path, 32)
    with pytest.raises(ConfigError, match=r"max_response_length is 33: expected at most 32"):
        check_rows_are_alike(path, 33)


@pytest.mark.parametrize("config", ALIKE, ids=json.dumps)
def test_frequencies_that_are_the_same_for_all_rows_are_no_limit(config, tmp_path):
    check_rows_are_alike(written(tmp_path, config), 10**6)
    check_rows_are_alike(str(tmp_path / "nothing"), 10**6)


@pytest.fixture
def phi(tmp_path):
    base = tiny_model(tmp_path / "phi")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 16.0, ORIGINAL: 32, **LONG}
    sizes[ORIGINAL] = 32
    config = Phi3Config(
        vocab_size=VOCABULARY, max_position_embeddings=512, rope_parameters=rope, pad_token_id=256, **sizes
    )
    model = Phi3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.12)  # as sharp as a trained one
    model.save_pretrained(base)
    return base


def test_a_longer_row_in_a_pass_does_change_the_frequencies_of_transformers(phi):
    """Where this fails, transformers has other frequencies for each row, and nothing need be refused."""
    model = AutoModelForCausalLM.from_pretrained(phi).eval()
    row = torch.arange(10)
    with torch.no_grad():
        alone = model(row[None]).logits[0]
        beside = model(torch.cat([row, torch.arange(40)])[None], position_ids=torch.cat([row, torch.arange(40)])[None])
    assert (alone - beside.logits[0, :10]).abs().max() > 1e-4


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
def test_plan_refuses_rows_that_are_too_long_for_phi(phi, digits_task, tmp_path, backend, capsys):
    more = [f"model.path={phi}", f"trainer.backend={backend}", "data.max_prompt_length=20"]
    command = ["plan", str(shipped("quickstart")), *digits_overrides(digits_task, tmp_path / "run"), *more]
    with pytest.raises(SystemExit):
        main([*command, "rollout.max_response_length=13"])
    assert "(rope_type 'longrope') follow the longest row of a pass" in capsys.readouterr().err
    main([*command, "rollout.max_response_length=12"])
