"""How far a trainer's log-probs are from the engine's, with and without router replay (R3,
arXiv:2510.11370).

    python benchmarks/router_replay.py [--engines transformers vllm] [--out FILE]

Two mixtures of experts: the one that configs/quickstart_moe.yaml begins with, on its task, and a
random one of 6 layers and 16 experts, whose experts and attention outputs are made 4 times as large
so that it matters which ones a token goes to. Each engine samples with the weights that the trainer
has, in float32 and in bfloat16, on this machine's CPUs.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow.parquet as pq
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

from sections import replace_section
from siirl_dask.algorithms import k3
from siirl_dask.config import Dtype, Engine, ModelConfig, RolloutConfig, TrainerConfig, VllmConfig
from siirl_dask.context import Device, Rank
from siirl_dask.models.broken_imports import hide
from siirl_dask.models.routing import needed_routing
from siirl_dask.rollout import Generation, Sampling, build_engine
from siirl_dask.tasks.sorting import write_sorting_task
from siirl_dask.testing.reference_model import pack_samples
from siirl_dask.training import build_trainer

_SAMPLES = 8  # of a prompt
_LARGER = 4.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what it is asked."""

    name: str
    folder: str
    prompts: list[list[int]]
    most: int
    """Tokens of a response."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", nargs="+", default=["transformers", "vllm"], choices=[*map(str, Engine)]
    )
    parser.add_argument("--out", type=Path, help="page whose section is replaced")
    given = parser.parse_args()
    hide()
    with TemporaryDirectory() as folder:
        lines = [
            "| model | engine | dtype | tokens | replay | largest | mean | KL |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for case in (_quickstart(Path(folder, "task")), _deep(Path(folder, "deep"))):
            for engine in map(Engine, given.engines):
                for dtype in (Dtype.float32, Dtype.bfloat16):
                    lines += _rows(case, engine, dtype)
                    Console(stderr=True).print(*lines[-2:], sep="\n")
    text = "\n".join(["## Sampler and trainer, with and without router replay", "", *lines])
    print(text)
    if given.out:
        replace_section(given.out, text)


def _quickstart(folder: Path) -> Case:
    """Return the quickstart's mixture after its warm start, and 32 prompts of its training data."""
    from transformers import AutoTokenizer

    task = write_sorting_task(folder, family="qwen3_moe")
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    texts = pq.read_table(task.train, columns=["prompt"])["prompt"][:32].to_pylist()
    return Case(
        "quickstart's, 2 layers, 2 of 4 experts",
        str(task.model),
        [tokenizer.encode(text) for text in texts],
        12,
    )


def _deep(folder: Path) -> Case:
    """Return a random mixture of 6 layers, and 8 random prompts of 20 to 149 tokens."""
    from transformers import AutoConfig, Qwen3MoeForCausalLM

    from siirl_dask.tasks.tiny_model import tiny_model

    tiny_model(folder, seed=1, family="qwen3_moe", tied=False, layers=6, hidden=128)
    config = AutoConfig.from_pretrained(folder)
    config.num_experts, config.num_experts_per_tok = 16, 4
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    larger = {
        name: each * _LARGER if "experts" in name or "o_proj" in name else each
        for name, each in weights.items()
    }
    save_file(larger, folder / "model.safetensors", {"format": "pt"})
    draw = random.Random(0)
    prompts = [[draw.randrange(256) for _ in range(draw.randrange(20, 150))] for _ in range(8)]
    return Case("random, 6 layers, 4 of 16 experts", str(folder), prompts, 64)


def _rows(case: Case, engine: Engine, dtype: Dtype) -> list[str]:
    """Return the table's lines of one engine and type: without replay, and with it."""
    model = ModelConfig(path=case.folder, dtype=dtype)
    vllm = VllmConfig(kv_cache_memory="256MiB") if engine is Engine.vllm else VllmConfig()
    rollout = RolloutConfig(engine=engine, router_replay=True, vllm=vllm)
    prompts = [prompt for prompt in case.prompts for _ in range(_SAMPLES)]
    built = build_engine(Device("0"), Rank(), model=model, rollout=rollout)
    try:
        samples = built.generate(prompts, range(len(prompts)), Sampling(max_tokens=case.most))
    finally:
        built.close()
    rows = replace(pack_samples(prompts, samples), routes=_routes(samples, case.folder))
    sampled = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    lines = []
    for replayed in (False, True):
        trainer = build_trainer(
            Device("0"),
            Rank(),
            model=model,
            trainer=TrainerConfig(),
            rollout=replace(rollout, router_replay=replayed),
        )
        lines.append(_line(case, engine, dtype, replayed, trainer.logprobs(rows).logprobs, sampled))
        trainer.close()
    return lines


def _routes(samples: list[Generation], folder: str) -> Tensor:
    """Return the routes of all tokens, [T, layers x experts]; the last of each row was never fed
    to the engine.
    """
    routing = needed_routing(folder)
    parts = []
    for sample in samples:
        assert sample.routes is not None, "the engine records routes"
        own = np.frombuffer(sample.routes, np.uint8).reshape(-1, routing.width)
        parts += [
            torch.tensor(own.astype(np.int16)),
            torch.full((1, routing.width), -1, dtype=torch.int16),
        ]
    return torch.cat(parts)


def _line(
    case: Case, engine: Engine, dtype: Dtype, replayed: bool, trained: Tensor, sampled: Tensor
) -> str:
    apart = (trained - sampled).abs()
    figures = f"{apart.max():.1e} | {apart.mean():.1e} | {k3(sampled, trained).mean():.1e}"
    return (
        f"| {case.name} | {engine} | {dtype} | {len(sampled)} | {'on' if replayed else 'off'} | "
        f"{figures} |"
    )


if __name__ == "__main__":
    main()
