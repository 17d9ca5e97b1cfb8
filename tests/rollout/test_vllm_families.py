"""Log-probs of vLLM are the trainer's for the families of docs/models.md, before and after new
weights.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")

import torch

from siirl_dask.config import Dtype, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rollout import Sampling
from siirl_dask.testing import reference_model
from siirl_dask.testing.reference_model import assert_agrees_with_trainer, pack_samples
from siirl_dask.training import build_trainer
from tests.rollout.test_vllm_engine import running
from tests.rollout.vllm_families import EQUAL, written_for_vllm
from tests.settings import trainer_config
from tests.training.test_hugging_face import image_text_model

SLOW = ("lfm2", "deepseek_v3")
"""Heads that its rotary kernel for CPUs takes apart; parameters that follow from others. OLMo 2, of
transformers' own classes, has a test of its own below."""
TWO = [3, 7]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else pytest.mark.sweep)
        for name in EQUAL
    ],
)
def test_log_probs_are_the_trainers_before_and_after_new_weights(tmp_path, name, monkeypatch):
    written_for_vllm(tmp_path, name, monkeypatch)
    with running(tmp_path) as engine:
        assert_agrees_with_trainer(engine, tmp_path, after=(0, 1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_5", pytest.param("qwen3_5_moe", marks=pytest.mark.sweep)])
def test_the_text_of_an_image_text_model_gets_new_weights_under_the_names_of_its_files(
    tmp_path, kind, monkeypatch
):
    """In bfloat16, which its kernels for CPUs want, and of two tokens at least. A layer that kept
    its weights would be off by nats.
    """
    image_text_model(tmp_path, kind, wide=True)
    monkeypatch.setattr(reference_model, "PROMPTS", [TWO, *reference_model.PROMPTS[1:]])
    with running(tmp_path, dtype=Dtype.bfloat16) as engine:
        assert_agrees_with_trainer(
            engine, tmp_path, after=(0, 1), dtype=Dtype.bfloat16, tolerance=0.4
        )


@pytest.mark.slow
def test_a_trainer_of_a_class_that_vllm_changes_scores_as_before(tmp_path, monkeypatch):
    """vLLM runs OLMo 2 by transformers' own class, and changes that for its compiler. Its log-probs
    are those of the trainer as with other families.
    """
    written_for_vllm(tmp_path, "olmo2", monkeypatch)
    trainer = build_trainer(
        Device("w0"),
        Rank(),
        model=ModelConfig(path=str(tmp_path)),
        trainer=trainer_config(),
        rollout=RolloutConfig(),
    )
    with running(tmp_path) as engine:
        samples = engine.generate([TWO, TWO], [1, 2], Sampling(max_tokens=4))
        rows = pack_samples([TWO, TWO], samples)
        beside = trainer.logprobs(rows).logprobs
        sampled = torch.tensor([each for sample in samples for each in sample.logprobs])
        assert_agrees_with_trainer(engine, tmp_path, after=(0, 1))
    assert (beside - sampled).abs().max() < 1e-4
    assert torch.equal(trainer.logprobs(rows).logprobs, beside)


@pytest.mark.sweep
def test_rows_beyond_the_rotary_frequencies_that_vllm_has_are_refused(tmp_path, monkeypatch):
    """64 places of YaRN, and rows of 140 tokens."""
    written_for_vllm(tmp_path, "yarn rotary", monkeypatch)
    with running(tmp_path) as engine:
        assert engine.context_length == 64
