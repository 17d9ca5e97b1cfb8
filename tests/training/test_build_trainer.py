import json
from functools import partial

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from siirl_dask.algorithms import TokenLoss, ppo_clip
from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.head import HeadOutput
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.training import PackedRows, TrainBatch, build_reference, build_trainer
from siirl_dask.training.model import network
from tests.settings import trainer_config

PPO = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
ROWS = PackedRows(torch.arange(20), torch.tensor([0, 8, 20]), torch.tensor([2, 5]))


@pytest.fixture
def folder(tmp_path):
    return tiny_model(tmp_path / "model")


def build(folder, make=build_trainer, dtype=Dtype.float32, temperature=1.0, rank=None, **settings):
    return make(
        Device("w0"),
        rank or Rank(),
        model=ModelConfig(path=str(folder), dtype=dtype),
        trainer=trainer_config(**{"lr": 1e-3} | settings),
        rollout=RolloutConfig(temperature=temperature),
    )


def batch(trainer):
    logprobs = trainer.logprobs(ROWS).logprobs
    return TrainBatch(
        rows=ROWS,
        old_logprobs=logprobs,
        rollout_logprobs=logprobs,
        advantages=torch.linspace(-1, 1, len(logprobs)),
    )


@pytest.mark.parametrize("make", [build_trainer, build_reference])
def test_a_missing_folder_is_refused(tmp_path, make):
    with pytest.raises(ConfigError, match=r"model\.path='.*nowhere': no such folder"):
        build(tmp_path / "nowhere", make)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path=.*transformers cannot load it"):
        build(tmp_path)


def test_a_model_that_computes_more_than_is_known_is_refused(tmp_path, monkeypatch):
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=300, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, head_dim=32,
        num_key_value_heads=1, final_logit_softcapping=0.05, attn_logit_softcapping=None,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    build(tmp_path)
    monkeypatch.setattr(network, "head_output", lambda config: HeadOutput())
    with pytest.raises(
        ConfigError, match=r"does not compute the log-probs of Gemma2ForCausalLM.*off by"
    ):
        build(tmp_path)


def test_a_reference_scores_and_refuses_to_learn(folder):
    reference, trainer = build(folder, build_reference), build(folder)
    assert torch.equal(reference.logprobs(ROWS).logprobs, trainer.logprobs(ROWS).logprobs)
    with pytest.raises(TypeError, match="build_trainer"):
        reference.update([batch(trainer)], PPO)


def test_logprobs_equal_the_engines_at_the_rollout_temperature(folder):
    trainer = build(folder, temperature=0.5)
    model = ModelConfig(path=str(folder))
    engine = build_engine(
        Device("w0"),
        Rank(),
        model=model,
        rollout=RolloutConfig(engine=Engine.transformers, temperature=0.5),
    )
    sample = engine.generate([[1, 2, 3]], [0], Sampling(max_tokens=9, temperature=0.5))[0]
    tokens = torch.tensor([1, 2, 3, *sample.token_ids])
    scores = trainer.logprobs(PackedRows(tokens, torch.tensor([0, len(tokens)]), torch.tensor([3])))
    assert_close(scores.logprobs, torch.tensor(sample.logprobs), atol=1e-5, rtol=0)


def test_trained_weights_load_into_an_engine(folder):
    trainer = build(folder)
    trainer.update([batch(trainer)], PPO)
    engine = build_engine(
        Device("w0"),
        Rank(),
        model=ModelConfig(path=str(folder)),
        rollout=RolloutConfig(engine=Engine.transformers),
    )
    engine.load_weights(trainer.weights(), 1)
    sample = engine.generate([[1, 2, 3]], [0], Sampling(max_tokens=9))[0]
    tokens = torch.tensor([1, 2, 3, *sample.token_ids])
    scores = trainer.logprobs(PackedRows(tokens, torch.tensor([0, len(tokens)]), torch.tensor([3])))
    assert_close(scores.logprobs, torch.tensor(sample.logprobs), atol=1e-5, rtol=0)


def test_bfloat16_computes_in_bfloat16_and_learns_in_float32(folder):
    trainer, exact = build(folder, dtype=Dtype.bfloat16, lr=1e-6), build(folder, lr=1e-6)
    assert_close(trainer.logprobs(ROWS).logprobs, exact.logprobs(ROWS).logprobs, atol=0.07, rtol=0)
    assert {tensor.dtype for _, tensor in trainer.weights()} == {torch.bfloat16}
    parameter = next(trainer._network.model.parameters())
    before = parameter.detach().clone()
    metrics = trainer.update([batch(trainer)], PPO)
    assert 0 < (parameter - before).abs().max() < 2e-6  # lost if the parameter were bfloat16
    assert metrics["grad_norm"] == pytest.approx(
        exact.update([batch(exact)], PPO)["grad_norm"], rel=0.05
    )


def test_gradients_are_clipped_by_their_norm_over_all_parameters(folder):
    trainer = build(folder, max_grad_norm=0.01)
    assert trainer.update([batch(trainer)], PPO)["grad_norm"] > 0.01
    assert torch.linalg.vector_norm(trainer._learner._gradients.flat) == pytest.approx(
        0.01, rel=1e-3
    )


def test_a_loss_without_one_number_per_token_is_refused(folder):
    trainer = build(folder)
    with pytest.raises(ValueError, match="a token each"):
        trainer.update([batch(trainer)], lambda inputs: TokenLoss(loss=inputs.logprobs.mean()))


def test_several_ranks_need_a_process_group(folder):
    with pytest.raises(ValueError, match="process group"):
        build(folder, rank=Rank(0, 2))


def test_packed_rows_respect_a_sliding_window(folder):
    file = folder / "config.json"
    window = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 0,
        "layer_types": None,
    }
    file.write_text(json.dumps(json.loads(file.read_text()) | window))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert set(model.config.layer_types) == {"sliding_attention"}
    expected = []
    for row, prompt in ((ROWS.tokens[:8], 2), (ROWS.tokens[8:], 5)):
        scores = model(row[None]).logits[0].log_softmax(-1)
        expected.append(scores[prompt - 1 : -1].gather(1, row[prompt:, None]).squeeze(1))
    assert_close(
        build(folder).logprobs(ROWS).logprobs, torch.cat(expected).detach(), atol=1e-5, rtol=0
    )
