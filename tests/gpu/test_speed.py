"""Three steps of a model with the shape of Qwen2.5-0.5B and random weights: tokens a second, MFU,
peak memory.

On a CPU the model is a tiny one, so that the same code is run.
"""

import time
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.estimates.speeds import TABLE
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.tasks.tiny_model import tiny_model
from siirl_dask.testing.reference_model import pack_samples
from siirl_dask.training import TrainBatch, build_trainer
from tests.gpu import devices

pytestmark = pytest.mark.gpu
ENGINES = [Engine.transformers, pytest.param(Engine.vllm, marks=pytest.mark.gpu(packages=["vllm"]))]
SHAPE = {
    "hidden": 896,
    "layers": 24,
    "heads": 14,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 4864,
}
VOCABULARY = 151_936
ROWS, PROMPT, RESPONSE = (4, 16, 8) if devices.ON_CPU else (64, 128, 384)


@dataclass
class Clock:
    """Seconds of each part of a step, and the tokens that it took."""

    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def time(self, part, tokens, work):
        devices.finish()
        began = time.perf_counter()
        result = work()
        devices.finish()
        self.seconds[part], self.tokens[part] = time.perf_counter() - began, tokens
        return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("speed") / "model"
    shape = {} if devices.ON_CPU else {**SHAPE, "vocabulary": VOCABULARY}
    return tiny_model(where, seed=1, family="qwen2", **shape)


@pytest.mark.parametrize("engine", ENGINES)
def test_three_steps_of_half_a_billion_parameters(folder, tell, engine):
    model, rollout = (
        ModelConfig(path=str(folder), dtype=Dtype.bfloat16),
        RolloutConfig(engine=engine, max_rows=ROWS),
    )
    rollout.vllm.gpu_memory_utilization, rollout.vllm.sleep_level = 0.4, 1
    rollout.vllm.kv_cache_memory = "64MiB" if devices.ON_CPU else "4GiB"
    sampler = build_engine(devices.device(), Rank(), model=model, rollout=rollout)
    learns = TrainerConfig(lr=1e-6, max_tokens_per_micro_batch=4096)
    trainer = build_trainer(devices.device(), Rank(), model=model, trainer=learns, rollout=rollout)
    parameters = sum(tensor.numel() for _, tensor in trainer.weights())
    lines = [
        f"{engine} and {parameters / 1e6:,.1f}M parameters, {ROWS} rows of {PROMPT} + up to "
        f"{RESPONSE} tokens"
    ]
    try:
        for step in range(3):
            lines.append(_describe(step, _step(sampler, trainer, step), parameters))
            assert sampler.version == step + 1
    finally:
        sampler.close()
        trainer.close()
    tell(
        "\n".join(
            [
                *lines,
                "peak of torch's allocator in this process: "
                + f"{devices.memory()[1] / 2**30:.2f} GiB",
            ]
        )
    )


def _step(sampler, trainer, step):
    clock = Clock()
    prompts = [
        [(7 * row + 3 * place + step) % 256 for place in range(PROMPT)] for row in range(ROWS)
    ]
    sampling, seeds = Sampling(max_tokens=RESPONSE), range(1000 * step, 1000 * step + ROWS)
    samples = clock.time("generate", 0, lambda: sampler.generate(prompts, seeds, sampling))
    clock.tokens["generate"] = sum(len(sample.token_ids) for sample in samples)
    sampler.sleep()
    rows = pack_samples(prompts, samples)
    scores = clock.time("log-probs", len(rows.tokens), lambda: trainer.logprobs(rows))
    sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    difference = float((scores.logprobs - sampled).abs().mean())
    assert difference < 0.05, (
        f"engine and trainer differ by {difference:.3f} in a log-prob on average"
    )
    batch = TrainBatch(
        rows=rows,
        old_logprobs=scores.logprobs,
        rollout_logprobs=sampled,
        advantages=torch.ones_like(sampled),
    )
    loss = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
    metrics = clock.time("update", len(rows.tokens), lambda: trainer.update([batch], loss))
    assert metrics["skipped_steps"] == 0
    clock.time("weights", 0, lambda: sampler.load_weights(trainer.weights(), step + 1))
    return clock


def _describe(step, clock, parameters):
    parts = [
        f"{part} {seconds:.2f} s"
        + (f" ({clock.tokens[part] / seconds:,.0f} tokens/s)" if clock.tokens[part] else "")
        for part, seconds in clock.seconds.items()
    ]
    return f"step {step + 1}: " + ", ".join(parts) + _mfu(clock, parameters)


def _mfu(clock, parameters):
    """Model FLOPs in a second of the update, over what the device can do: 6 a parameter and
    token, no attention.
    """
    name = "" if devices.ON_CPU else torch.get_device_module(str(devices.kind())).get_device_name()
    peak = next((speed.flops for known, speed in TABLE.items() if known in name.lower()), None)
    rate = 6 * parameters * clock.tokens["update"] / clock.seconds["update"]
    if peak is None:
        return (
            f"; update at {rate / 1e12:.3f} TFLOP/s (the peak of {name or 'a CPU'} is not known "
            "here)"
        )
    return (
        f"; update at {rate / 1e12:.1f} TFLOP/s, MFU {rate / peak:.1%} of {name}'s "
        f"{peak / 1e12:.0f}"
    )
