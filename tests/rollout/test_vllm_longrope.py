"""vLLM takes the rotary factors of the trainer, by the longest row of the run (longrope)."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch
from transformers import Phi3Config, Phi3ForCausalLM

from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.tasks.tiny_model import VOCABULARY, tiny_model
from siirl_dask.testing.reference_model import pack_samples
from siirl_dask.training import build_trainer

PROMPTS = [[7], [1, 2, 3], list(range(11))]


@pytest.fixture(scope="module")
def phi(tmp_path_factory):
    base = tiny_model(tmp_path_factory.mktemp("vllm") / "phi")
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 3 * at for at in range(16)]}
    torch.manual_seed(0)
    config = Phi3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,  # heads of 32, the least that vLLM's attention has on a CPU
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
        pad_token_id=256,
        eos_token_id=257,
    )
    model = Phi3ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.12)  # as sharp as a trained one
    model.save_pretrained(base)
    return base


@pytest.mark.parametrize(("longest", "response"), [(50, 35), (50, 5), (30, 15)])
def test_log_probs_are_the_trainers_whether_rows_are_long_or_short(phi, longest, response):
    """Rows of 6 to 16 tokens have long factors as well, where the run may have one of 50."""
    model = ModelConfig(path=str(phi), dtype=Dtype.float32, longest_row=longest)
    rollout = RolloutConfig(engine=Engine.vllm)
    engine = build_engine(Device("w0"), Rank(), model=model, rollout=rollout)
    try:
        assert engine.context_length == longest
        samples = engine.generate(PROMPTS, range(3), Sampling(temperature=1.0, max_tokens=response))
    finally:
        engine.close()
    assert {len(sample.token_ids) for sample in samples} == {response}
    sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    trainer = build_trainer(
        Device("w0"), Rank(), model=model, trainer=TrainerConfig(), rollout=rollout
    )
    trained = trainer.logprobs(pack_samples(PROMPTS, samples)).logprobs
    torch.testing.assert_close(sampled, trained, atol=1e-4, rtol=0)
