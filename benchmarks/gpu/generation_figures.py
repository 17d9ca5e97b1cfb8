"""Figures of generation: the transformers engine by rows, the sampler at a large vocabulary,
ceilings of the device.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import results
from setting import median_seconds, model_folder, setting
from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig
from siirl_dask.context import Rank
from siirl_dask.rollout import Sampling, build_engine
from siirl_dask.rollout.token_sampling import TokenSampler
from tests.gpu import devices
from training_figures import write_profile


def ceilings(out: Path) -> None:
    """Measure what the device does at best: a product of bfloat16 matrices, and a copy within
    its memory.
    """
    chosen = setting()
    name = devices.device().torch_name
    left = torch.randn(chosen.square, chosen.square, device=name, dtype=torch.bfloat16)
    right = torch.randn(chosen.square, chosen.square, device=name, dtype=torch.bfloat16)
    source = torch.randn(chosen.copied, device=name)
    target = torch.empty_like(source)
    product = median_seconds(lambda: left @ right)
    copy = median_seconds(lambda: target.copy_(source))
    results.append(
        out,
        part="ceilings",
        figure="ceilings",
        matmul_tflops=results.rounded(2 * chosen.square**3 / product / 1e12),
        copy_gb_s=results.rounded(2 * source.nbytes / copy / 1e9),
    )


def decode(out: Path) -> None:
    """Measure tokens a second of the transformers engine at several numbers of rows, and profile
    eight tokens.
    """
    chosen = setting()
    model = ModelConfig(path=str(model_folder()), dtype=Dtype.bfloat16)
    rollout = RolloutConfig(engine=Engine.transformers, max_rows=256)
    engine = build_engine(devices.device(), Rank(), model=model, rollout=rollout)
    try:
        for rows, new_tokens in chosen.decoded:
            prompts = [_prompt(row) for row in range(rows)]
            sampling = Sampling(max_tokens=new_tokens)
            lengths: list[int] = []

            def generate(
                prompts: list[list[int]] = prompts,
                sampling: Sampling = sampling,
                lengths: list[int] = lengths,
            ) -> None:
                samples = engine.generate(prompts, range(len(prompts)), sampling)
                lengths[:] = [len(sample.token_ids) for sample in samples]

            seconds = median_seconds(generate, times=1)
            results.append(
                out,
                part="decode",
                figure=f"decode/{rows}",
                rows=rows,
                longest=max(lengths),
                tokens_s=results.rounded(sum(lengths) / seconds),
                ms_per_token=results.rounded(seconds / max(lengths) * 1e3),
            )
        few = [_prompt(row) for row in range(4)]
        write_profile(
            out, "decode", "decode", lambda: engine.generate(few, range(4), Sampling(max_tokens=8))
        )
    finally:
        engine.close()


def _prompt(row: int) -> list[int]:
    return [(7 * row + 3 * position) % 250 + 1 for position in range(setting().prompt)]


def sampler(out: Path) -> None:
    """Measure a draw of one token for each row, and hold that a row's token does not depend on
    the others.
    """
    rows, vocabulary = setting().sampled
    logits = torch.randn(rows, vocabulary, device=devices.device().torch_name)
    seeds = np.arange(rows, dtype=np.uint64)
    cloning = median_seconds(logits.clone, 10)
    ways = {
        "plain": Sampling(max_tokens=1),
        "top_p": Sampling(max_tokens=1, top_p=0.95),
        "top_k": Sampling(max_tokens=1, top_k=50),
    }
    for name, sampling in ways.items():
        draw = TokenSampler(sampling)
        seconds = median_seconds(lambda draw=draw: draw(logits.clone(), seeds, 3), 10)
        results.append(
            out,
            part="sampler",
            figure=f"sampler/{name}",
            rows=rows,
            vocabulary=vocabulary,
            ms=results.rounded(1e3 * (seconds - cloning)),
            clone_ms=results.rounded(1e3 * cloning),
        )
    draw = TokenSampler(ways["plain"])
    together, _ = draw(logits.clone(), seeds, 3)
    alone = [draw(logits[row : row + 1].clone(), seeds[row : row + 1], 3)[0] for row in range(rows)]
    equal = bool(torch.equal(together, torch.cat(alone)))
    results.append(out, part="sampler", figure="sampler/any-batch", equal=equal)
    if not equal:
        raise SystemExit("a row's token depends on the rows that it is drawn with")
