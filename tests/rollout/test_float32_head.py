"""``model.float32_head``: engines sample from products in float32 of bfloat16 hidden states and
a rounded head.
"""

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.sglang_engine.settings import server_arguments
from siirl_dask.rollout.transformers_engine import engine as transformers_engine
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from tests.float32_heads import FAMILIES, WIDE, head_of, logprobs_of, write_model


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.parametrize("widened", [2**22, 5000, 1], ids=["whole", "in parts", "row by row"])
def test_the_transformers_engine_samples_from_products_in_float32(folder, widened, monkeypatch):
    monkeypatch.setattr(transformers_engine, "_WIDENED", widened)
    engine = TransformersEngine(ModelConfig(path=str(folder), **WIDE))
    weights = load_file(folder / "model.safetensors")
    moved = {name: weight + 0.05 * torch.ones_like(weight) for name, weight in weights.items()}
    for head in (head_of(folder), head_of(folder) + 0.05):
        decoder = engine._model.get_decoder()
        states = []
        hook = decoder.register_forward_hook(
            lambda *call: states.append(call[-1].last_hidden_state[:, -1])  # noqa: B023
        )
        (sample,) = engine.generate([[1, 2, 3]], [0], Sampling(max_tokens=6, temperature=0.7))
        hook.remove()
        found = torch.tensor(sample.logprobs)
        tokens = torch.tensor(sample.token_ids)
        assert_close(
            found,
            logprobs_of(torch.cat(states)[: len(tokens)], head, tokens, 0.7),
            atol=1e-5,
            rtol=0,
        )
        engine.load_weights(moved.items(), 1)


def test_without_it_the_transformers_engine_rounds_logits(folder):
    engine = TransformersEngine(ModelConfig(path=str(folder), dtype=Dtype.bfloat16))
    head = engine._model.get_output_embeddings()
    assert head(torch.ones(1, head.in_features, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_sglang_is_asked_for_it_by_its_own_argument():
    rollout = RolloutConfig()
    for wide in (True, False):
        model = ModelConfig(path="model", dtype=Dtype.bfloat16, float32_head=wide)
        arguments = server_arguments(model, rollout, Device("w0"), ["torch_native"])
        assert arguments.get("enable_fp32_lm_head", False) is wide
