"""Figures of training: tokens a second, MFU, peak memory next to the plan's, profiles; a step
without this package.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedModel

import results
from setting import WORK, median_seconds, model_folder, setting
from siirl_dask.algorithms import ppo_clip
from siirl_dask.config import Dtype, ModelConfig, RolloutConfig, TrainerConfig
from siirl_dask.context import Rank
from siirl_dask.estimates.speeds import TABLE
from siirl_dask.models.architecture import read_architecture
from siirl_dask.models.shapes import count_parameters
from siirl_dask.testing.rows import random_rows, signs
from siirl_dask.training import TrainBatch, build_trainer
from siirl_dask.training.memory import ModelOnWorkers, footprint
from tests.gpu import devices

_CALLS = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "aten::item")


def train(
    out: Path, part: str, config: TrainerConfig, label: str, *, profiled: bool = False
) -> None:
    """Measure log-probs and updates of the setting's rows with a trainer of the configuration,
    in bfloat16.
    """
    chosen = setting()
    model = ModelConfig(path=str(model_folder()), dtype=Dtype.bfloat16)
    _reset_peak()
    trainer = build_trainer(
        devices.device(), Rank(), model=model, trainer=config, rollout=RolloutConfig()
    )
    try:
        rows = random_rows([(chosen.prompt, chosen.response)] * chosen.rows)
        parameters = sum(tensor.numel() for _, tensor in trainer.weights())
        scored = trainer.logprobs(rows).logprobs
        batch = TrainBatch(
            rows=rows, old_logprobs=scored, rollout_logprobs=scored, advantages=signs(rows)
        )
        loss = partial(ppo_clip, clip_low=0.2, clip_high=0.2)
        scoring = median_seconds(lambda: trainer.logprobs(rows))
        updating = median_seconds(lambda: trainer.update([batch], loss))
        tokens = len(rows.tokens)
        # without those of attention, which are 5 % at 512 tokens
        flops = 6 * parameters * tokens / updating
        results.append(
            out,
            part=part,
            figure=f"train/{label}",
            tokens=config.max_tokens_per_micro_batch,
            logprobs_tokens_s=results.rounded(tokens / scoring),
            update_tokens_s=results.rounded(tokens / updating),
            tflops=results.rounded(flops / 1e12),
            **_mfu(flops),
            peak_gib=results.rounded(devices.memory()[1] / 2**30),
            plan_gib=results.rounded(planned_bytes(config) / 2**30),
        )
        if profiled:
            write_profile(out, part, f"update-{label}", lambda: trainer.update([batch], loss))
    finally:
        trainer.close()


def _reset_peak() -> None:
    """Forget the peak of what this process measured before."""
    if devices.ON_CPU:
        return
    module = torch.get_device_module(str(devices.kind()))
    module.empty_cache()
    module.reset_peak_memory_stats()


def _mfu(flops: float) -> dict[str, float]:
    """The share of the device's arithmetic, where its peak is known."""
    if devices.ON_CPU:
        return {}
    name = torch.get_device_module(str(devices.kind())).get_device_name().lower()
    for known, speed in TABLE.items():
        if known in name:
            return {"mfu": results.rounded(flops / speed.flops)}
    return {}


def planned_bytes(config: TrainerConfig) -> float:
    """Bytes that ``plan`` expects of this trainer on its device: what it holds, and what a pass
    takes besides.
    """
    chosen = setting()
    folder = str(model_folder())
    expected = footprint(
        ModelOnWorkers(
            size=count_parameters(folder),
            architecture=read_architecture(folder),
            trainer=config,
            dtype=Dtype.bfloat16,
            ranks=1,
            tokens=min(
                config.max_tokens_per_micro_batch, chosen.rows * (chosen.prompt + chosen.response)
            ),
        )
    )
    return sum(expected.held.values()) + sum(expected.working.values())


def write_profile(out: Path, part: str, name: str, work: Callable[[], object]) -> None:
    """Profile one call: the share of time in which the device was busy, and calls that wait for
    it or launch on it.
    """
    kinds = [ProfilerActivity.CPU]
    if not devices.ON_CPU:
        kinds.append(ProfilerActivity.CUDA)
    devices.finish()
    began = time.perf_counter()
    with profile(activities=kinds) as seen:
        work()
        devices.finish()
    wall = time.perf_counter() - began
    table = seen.key_averages()
    kernels = [
        each
        for each in table
        if str(each.device_type).endswith("CUDA") and not each.is_user_annotation
    ]
    busy = sum(each.self_device_time_total for each in kernels) / 1e6
    calls = {
        each.key: each.count for each in table if "ynchronize" in each.key or each.key in _CALLS
    }
    results.append(
        out,
        part=part,
        figure=f"profile/{name}",
        wall_s=results.rounded(wall),
        busy_s=results.rounded(busy),
        busy_share=results.rounded(busy / wall),
        calls=calls,
    )
    order = "self_cpu_time_total" if devices.ON_CPU else "self_device_time_total"
    text = table.table(sort_by=order, row_limit=40, max_name_column_width=80)
    (WORK / "logs" / f"profile-{name.replace('/', '-')}.txt").write_text(text)


def plain(out: Path) -> None:
    """Measure the same step without this package: padded rows, whole logits, autocast over
    float32 weights.
    """
    chosen = setting()
    name = devices.device().torch_name
    folder = str(model_folder())
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    ).to(name)
    adam = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ids = torch.randint(1, 250, (chosen.rows, chosen.prompt + chosen.response), device=name)
    micro_batches = ids.split(max(1, chosen.micro_rows // 2))

    def score() -> None:
        for micro_batch in micro_batches:
            with torch.no_grad():
                _logprobs(model, micro_batch)

    def update() -> None:
        for micro_batch in micro_batches:
            logprobs = _logprobs(model, micro_batch)
            ratio = (logprobs - logprobs.detach()).exp()
            (-ratio.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()

    results.append(
        out,
        part="plain",
        figure="plain/train",
        logprobs_tokens_s=results.rounded(ids.numel() / median_seconds(score)),
        update_tokens_s=results.rounded(ids.numel() / median_seconds(update)),
        peak_gib=results.rounded(devices.memory()[1] / 2**30),
    )
    model.bfloat16().eval()
    _plain_decode(out, model, ids[:, : chosen.prompt])


def _logprobs(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of the responses' tokens. [B, T] -> [B, R]."""
    response = setting().response
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits = (
            model(input_ids=ids, use_cache=False, logits_to_keep=response + 1)
            .logits[:, :-1]
            .float()
        )
    return torch.log_softmax(logits, -1).gather(2, ids[:, -response:, None]).squeeze(2)


def _plain_decode(out: Path, model: PreTrainedModel, prompts: torch.Tensor) -> None:
    rows, new_tokens = setting().decoded[1]
    prompts = prompts[:rows]
    options = {
        "do_sample": True,
        "max_new_tokens": new_tokens,
        "min_new_tokens": new_tokens,
        "pad_token_id": 0,
    }
    mask = torch.ones_like(prompts)
    seconds = median_seconds(
        lambda: model.generate(prompts, attention_mask=mask, **options), times=1
    )
    results.append(
        out,
        part="plain",
        figure="plain/decode",
        rows=rows,
        tokens_s=results.rounded(rows * new_tokens / seconds),
        ms_per_token=results.rounded(seconds / new_tokens * 1e3),
    )
