"""Adapters in vLLM: its layers, and merged weights, both agree with the trainer that learned
them.
"""

from __future__ import annotations

from functools import partial

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: one of the extras cpu and gpu brings it")
pytest.importorskip("peft", reason="peft is not installed: the extra lora brings it")

import torch
from torch.testing import assert_close

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, Engine, LoraConfig, ModelConfig, RolloutConfig
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.models.adapters import Adapter
from siirl_dask.rollout import Sampling
from siirl_dask.rollout.transformers_engine.engine import TransformersEngine
from siirl_dask.rollout.vllm_engine.adapter_layers import put_adapters
from siirl_dask.rollout.vllm_engine.engine import VllmEngine
from siirl_dask.rollout.vllm_engine.process_groups import EngineRanks
from siirl_dask.rollout.vllm_engine.settings import llm_arguments
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import PROMPTS, pack_samples
from siirl_dask.testing.rows import LENGTHS, random_rows, signs
from siirl_dask.training import TrainBatch, build_trainer
from tests.settings import rollout_config, trainer_config

ROWS, SAMPLING = random_rows(LENGTHS), Sampling(max_tokens=8)
LAYERS = {"engine_kwargs": {"enable_lora": True}}


def trained(folder, rank, targets=(), updates=3):
    """A policy whose adapters have learned something."""
    settings = trainer_config(lr=3e-2, lora_rank=rank, lora_alpha=8.0, lora_targets=list(targets))
    model = ModelConfig(path=str(folder))
    trainer = build_trainer(
        Device("w"), Rank(), model=model, trainer=settings, rollout=RolloutConfig()
    )
    for _ in range(updates):
        logprobs = trainer.logprobs(ROWS).logprobs
        batch = TrainBatch(
            rows=ROWS, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=signs(ROWS)
        )
        trainer.update([batch], partial(ppo_clip, clip_low=0.2, clip_high=0.2))
    return trainer, settings.lora


def assert_agrees(engine, trainer):
    """Engine and trainer give the tokens that the engine draws the same log-probs."""
    samples = engine.generate(PROMPTS, range(len(PROMPTS)), SAMPLING)
    given = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    assert_close(
        given, trainer.logprobs(pack_samples(PROMPTS, samples)).logprobs, atol=1e-4, rtol=0
    )
    return samples


def assert_takes_adapters(engine, folder):
    """Adapters of any rank and for any layers change what is sampled at once, and leave nothing
    behind.
    """
    plain = TransformersEngine(ModelConfig(path=str(folder)))
    before = engine.generate(PROMPTS, range(len(PROMPTS)), SAMPLING)
    for version, (rank, targets) in enumerate([(3, ()), (2, ("q_proj", "down_proj")), (3, ())], 1):
        trainer, lora = trained(folder, rank, targets)
        for one in (engine, plain):
            one.load_adapters(trainer.adapters(), lora.alpha / lora.rank, version)
        samples = assert_agrees(engine, trainer)
        assert engine.version == version
        assert samples != before
        expected = plain.generate(PROMPTS, range(len(PROMPTS)), SAMPLING)
        assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in expected]
    with pytest.raises(
        ValueError, match=r"adapters of version 9 do not fit: .*lora_A.weight is missing"
    ):
        engine.load_adapters(list(trainer.adapters())[1:], 1.0, 9)
    assert engine.generate(PROMPTS, range(len(PROMPTS)), SAMPLING) == samples


@pytest.mark.slow
def test_engine_and_trainer_agree_on_adapters_in_layers(tmp_path, caplog):
    """Merged ones are tried by the conformance suite: that is what vLLM gets on a CPU."""
    folder = tiny_model(tmp_path / "model", seed=1)
    rollout = rollout_config(engine=Engine.vllm, max_rows=8, kv_cache_memory="64MiB", **LAYERS)
    with caplog.at_level("INFO", "siirl_dask.rollout"):
        engine = VllmEngine(
            ModelConfig(path=str(folder)), rollout, Device("w"), lora=LoraConfig(rank=3)
        )
    assert "vLLM computes with adapters in layers of its own" in caplog.text
    try:
        assert_takes_adapters(engine, folder)
        unheard_of = {"model.router.weight": Adapter(torch.zeros(2, 4), torch.zeros(4, 2))}
        with pytest.raises(
            ConfigError, match=r"vLLM has no adapters for \['model.router'\]: .*enable_lora=false"
        ):
            engine._llm.apply_model(partial(put_adapters, adapters=unheard_of, scaling=1.0))
    finally:
        engine.close()


def arguments(dtype=Dtype.bfloat16, kind=DeviceKind.CUDA, rank=9, **rollout):
    model = ModelConfig(path="model", dtype=dtype)
    device, ranks = Device("w", kind, 0, "card"), EngineRanks(Rank(), 1)
    return llm_arguments(
        model, rollout_config(engine=Engine.vllm, **rollout), device, ranks, LoraConfig(rank=rank)
    )


def test_vllm_gets_layers_where_its_kernels_can_compute_them():
    given = arguments()
    assert {name: given[name] for name in ("enable_lora", "max_loras", "max_lora_rank")} == {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": 16,
    }  # fmt: skip
    for others in (
        {"rank": 0}, {"rank": 513}, {"dtype": Dtype.float32}, {"kind": DeviceKind.CPU},
        {"engine_kwargs": {"enable_lora": False}},
    ):  # fmt: skip
        assert not arguments(**others).get("enable_lora"), others
    assert (
        arguments(kind=DeviceKind.CPU, engine_kwargs={"enable_lora": True})["max_lora_rank"] == 16
    )
    with pytest.raises(
        ConfigError, match=r"trainer\.lora\.rank=513: vLLM has layers for adapters of at most 512"
    ):
        arguments(rank=513, engine_kwargs={"enable_lora": True})
