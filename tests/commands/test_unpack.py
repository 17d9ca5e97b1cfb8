"""``siirl-dask unpack``: a packed (quantized) model becomes one that trains, with transformers'
numbers.
"""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config

from siirl_dask.commands.unpack import unpack
from siirl_dask.config import Backend, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.packed_weights import check_not_packed, packing_of
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import load_model, plain_scores
from siirl_dask.testing.trainers import random_rows
from siirl_dask.training.files import unpack as unpacking
from tests.training.roles import policy

ROWS = random_rows([(5, 7), (3, 30)])


@pytest.fixture(scope="module")
def in_mxfp4(tmp_path_factory):
    """A tiny model as GPT-OSS is published: experts of random blocks and scales."""
    folder = tmp_path_factory.mktemp("mxfp4")
    config = GptOssConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    packed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            packed[f"{name}_blocks"] = torch.randint(
                0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
            )
            packed[f"{name}_scales"] = torch.randint(
                118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8
            )
        else:
            packed[name] = tensor
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(
        folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    )
    return folder


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory):
    """A tiny model as Qwen3's FP8 checkpoints are: a factor for each block of the layers'
    matrices.
    """
    folder = tiny_model(tmp_path_factory.mktemp("fp8") / "model", family="qwen3_moe", tied=False)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in list(weights.items()):
        if name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            factors = 2.0 ** torch.randint(-9, -7, (rows // 8, columns // 16))
            weights[f"{name}_scale_inv"] = factors
            weights[name] = (tensor / factors.repeat_interleave(8, 0).repeat_interleave(16, 1)).to(
                torch.float8_e4m3fn
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    packing = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 16]}
    change_config(folder, quantization_config=packing)
    return folder


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.parametrize(
    ("packed", "options"),
    [
        ("in_mxfp4", Mxfp4Config(dequantize=True)),
        ("in_fp8", FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 16))),
    ],
    ids=["mxfp4", "fp8"],
)
@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["one file", "several files"])
def test_an_unpacked_model_has_the_weights_that_transformers_unpacks(
    packed, options, shard, tmp_path, request, monkeypatch
):
    monkeypatch.setattr(unpacking, "_SHARD", shard)
    folder, out = request.getfixturevalue(packed), tmp_path / "out"
    assert unpack(str(folder), str(out)) == packing_of(str(folder))
    assert (len(list(out.glob("*.safetensors"))) > 1) is (shard == "40KB")
    check_not_packed(str(out))
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options, dtype=torch.bfloat16
    )
    ours = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    expected = dict(theirs.named_parameters())
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("part", ["text_config", None])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_unpacked_model_says_nothing_of_packed_weights(part, key, in_fp8, tmp_path):
    folder = shutil.copytree(in_fp8, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    packing = {key: config.pop("quantization_config")}
    if part is not None:
        packing = {part: packing}
    (folder / "config.json").write_text(json.dumps(config | packing))
    unpack(str(folder), str(tmp_path / "out"))
    check_not_packed(str(tmp_path / "out"))


@pytest.mark.parametrize("backend", [Backend.torch, Backend.fsdp])
def test_an_unpacked_model_is_scored_by_trainers_as_by_transformers(backend, in_mxfp4, tmp_path):
    out = tmp_path / "out"
    unpack(str(in_mxfp4), str(out))
    trainer = policy(out, replace(TrainerConfig(), backend=backend), temperature=1.0, rank=Rank())
    expected = plain_scores(load_model(out), ROWS, 1.0)
    assert_close(trainer.logprobs(ROWS).logprobs, expected.logprobs.detach(), atol=1e-5, rtol=0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_each_number_is_multiplied_by_the_factor_of_its_block(rows, columns, height, width):
    matrix = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    factors = torch.rand(-(-rows // height), -(-columns // width))
    found = unpacking._times_scales(matrix, factors, (height, width))
    for row in range(rows):
        for column in range(columns):
            assert (
                found[row, column]
                == matrix[row, column].float() * factors[row // height, column // width]
            )


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({}, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": None}, None),
    ],
)
def test_packed_weights_are_refused_by_their_method_before_a_run(config, method, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | config))
    assert packing_of(str(tmp_path)) == method
    if method is None:
        check_not_packed(str(tmp_path))
        return
    with pytest.raises(ConfigError, match=f"packed .*{method}.*siirl-dask unpack"):
        check_not_packed(str(tmp_path))


def test_weights_that_modelopt_has_packed_are_refused_though_config_json_says_nothing(tmp_path):
    """vLLM goes by that file, and transformers does not look at it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    packing = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(packing))
    with pytest.raises(ConfigError, match=r"packed \(config.json or hf_quant_config.json names"):
        check_not_packed(str(tmp_path))


def lack_scales(weights):
    del weights["model.layers.0.mlp.experts.down_proj_scales"]


def have_another_type(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.float8_e4m3fn)


def have_scales_of_another_matrix(weights):
    weights["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("packed", "damage", "named"),
    [
        ("in_mxfp4", lack_scales, "lack 'model.layers.0.mlp.experts.down_proj_scales'"),
        ("in_mxfp4", have_another_type, "'model.norm.weight' is F8_E4M3"),
        (
            "in_fp8",
            have_scales_of_another_matrix,
            "are not those of 'model.layers.0.self_attn.q_proj.weight'",
        ),
    ],
)
def test_damaged_weights_are_named_and_leave_nothing_at_the_destination(
    packed, damage, named, tmp_path, request
):
    weights = load_file(request.getfixturevalue(packed) / "model.safetensors")
    damage(weights)
    folder = tmp_path / "damaged"
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(
        (request.getfixturevalue(packed) / "config.json").read_bytes()
    )
    with pytest.raises(ConfigError, match=named):
        unpack(str(folder), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_packed_and_one_whose_packing_is_not_known_are_refused(tmp_path):
    folder = tiny_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="not packed"):
        unpack(str(folder), str(tmp_path / "out"))
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match="'gptq', which is not known here"):
        unpack(str(folder), str(tmp_path / "out"))
    change_config(folder, quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match="packed by 'fp8', and no tensor is"):
        unpack(str(folder), str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="no model is at"):
        unpack(str(tmp_path / "nothing"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
