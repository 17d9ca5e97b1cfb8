"""Tokens of images, videos and sound in rows of text are scored and sampled as by plain
transformers: some models read others in their place.
"""

from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import CONFIG_MAPPING

from siirl_dask.config import Backend, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models import broken_imports
from siirl_dask.models.loading import class_of_config
from siirl_dask.rollout.transformers_engine.decoding import decode, use_decoding
from siirl_dask.tasks.tiny_model import tiny_tokenizer
from siirl_dask.tasks.vocabulary import VOCABULARY
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.testing.reference_model import response_logprobs
from siirl_dask.testing.rows import split_rows
from siirl_dask.training import PackedRows, build_trainer
from tests.settings import trainer_config

IMAGE, VIDEO, AUDIO = 250, 251, 252
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "pad_token_id": 3,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_heads": 2, "depth": 1, "out_hidden_size": 32, "patch_size": 4, "image_size": 28,
}  # fmt: skip


def rotary(*sections):
    settings = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}
    return {**TEXT, "rope_parameters": settings}


GEMMA4 = {**TEXT, "vocab_size_per_layer_input": VOCABULARY, "layer_types": ["full_attention"] * 2}
FAMILIES = {
    "gemma4": ("gemma4", {**GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4 with embeddings of each layer": ("gemma4", GEMMA4),
    "gemma3": ("gemma3", TEXT),
    "mistral3": ("mistral3", TEXT),
    "qwen2_5_vl": ("qwen2_5_vl", {**rotary(2, 3, 3), "hidden_size": 64}),
    "qwen3_vl": ("qwen3_vl", rotary(2, 3, 3)),
    "ernie4_5_vl_moe": (
        "ernie4_5_vl_moe",
        {
            **rotary(3, 3, 2),
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [16, 8],
            "mlp_layer_types": ["dense", "sparse"],
        },
    ),
}
PROMPTS = ([5, 6, 7], [5, AUDIO, 8, 9])
RESPONSES = ([1, IMAGE, 2, VIDEO, 4], [AUDIO, 1, IMAGE, IMAGE, 2])


def written(folder, name):
    """Write a model of a family, and return it; its attention is far from uniform."""
    kind, text = FAMILIES[name]
    places = {"image_token_id": IMAGE}
    if kind in ("gemma3", "mistral3"):
        places = {"image_token_index": IMAGE}
    elif kind != "gemma4":
        places["video_token_id"] = VIDEO
    else:
        places |= {"video_token_id": VIDEO, "audio_token_id": AUDIO}
    config = CONFIG_MAPPING[kind](text_config=text, vision_config=TOWER, **places)
    model = class_of_config(config).from_config(config).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if parameter.ndim >= 2:
                parameter.copy_(2 * noise * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def rows():
    both = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    return PackedRows(
        torch.tensor([token for row in both for token in row]),
        torch.tensor([0, *map(len, both)]).cumsum(0),
        torch.tensor([*map(len, PROMPTS)]),
    )


def expected_of(model):
    with torch.no_grad():
        scored = [
            response_logprobs(model, row[:prompt].tolist(), row[prompt:].tolist())
            for row, prompt in split_rows(rows())
        ]
    return torch.cat(scored)


def trainer_of(folder, rank, **settings):
    return build_trainer(
        Device("w0"),
        rank,
        model=ModelConfig(path=str(folder)),
        trainer=trainer_config(**settings),
        rollout=RolloutConfig(),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_sampled_token_of_an_image_is_scored_as_plain_transformers_scores_it(name, tmp_path):
    model = written(tmp_path, name)
    trainer = trainer_of(tmp_path, Rank())
    assert trainer._network.layout == "packed"
    assert_close(trainer.logprobs(rows()).logprobs, expected_of(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gemma4 with embeddings of each layer", "ernie4_5_vl_moe"])
def test_ranks_that_share_the_parameters_score_it_so_too(name, tmp_path):
    model = written(tmp_path / "model", name)
    (tmp_path / "ranks").mkdir()
    for found in run_ranks(2, partial(_scores, str(tmp_path / "model")), tmp_path / "ranks"):
        assert_close(found, expected_of(model), atol=1e-5, rtol=1e-5)


def _scores(folder, rank):
    broken_imports.hide()
    return trainer_of(folder, rank, backend=Backend.fsdp).logprobs(rows()).logprobs


@pytest.mark.parametrize("name", FAMILIES)
def test_the_engine_samples_behind_such_a_token_as_plain_transformers_does(name, tmp_path):
    model = written(tmp_path, name)
    script = torch.tensor(RESPONSES)

    def choose(logits, rows, at):
        tokens = script[rows, at]
        return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]

    engine = written(tmp_path, name)
    assert use_decoding(engine)
    _, logprobs = decode(engine, PROMPTS, [5, 5], frozenset(), 0, choose)
    assert_close(logprobs.flatten(), expected_of(model), atol=1e-4, rtol=1e-4)
