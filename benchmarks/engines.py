"""Tokens a second of the two engines, on one worker: vLLM admits a row as soon as another is done, transformers waits
for the longest of a batch.

    python benchmarks/engines.py [--rows 512] [--batch 64] [--rounds 3] [--threads 2] [--out docs/benchmarks/engines.md]

A model of 32 million random parameters, built on the spot, generates rows whose lengths are log-normal: each row has a
limit of its own and no token ends it. Both engines draw the same tokens, which is checked. Rounds alternate.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from rich.console import Console

from generation import LONGEST, MEDIAN, SIGMA, endless_model, long_tailed
from sections import replace_section
from siirl_dask.config import Engine, ModelConfig, RolloutConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rollout import (
    Generation,
    GenerationRequest,
    LocalQueue,
    RolloutEngine,
    Sampling,
    build_engine,
)

_PROMPT = 32  # tokens
_SIZES = {
    "hidden": 512,
    "layers": 10,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 1536,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64, help="rows at once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    requests = make_requests(given.rows)
    with TemporaryDirectory() as folder:
        model, parameters = endless_model(Path(folder, "model"), **_SIZES)
        engines = {
            kind: make_engine(kind, model, given.batch)
            for kind in (Engine.transformers, Engine.vllm)
        }
        for engine in engines.values():
            generate(engine, requests[: given.batch // 4])
        rates, tokens = measure(engines, requests, given.rounds)
    text = report(rates, tokens, parameters, given)
    Console().print(text)
    if given.out:
        replace_section(given.out, text)


def make_requests(rows: int) -> list[GenerationRequest]:
    prompts = np.random.default_rng(1).integers(0, 256, (rows, _PROMPT)).tolist()
    ways = [Sampling(max_tokens=length) for length in long_tailed(rows)]
    return [
        GenerationRequest(prompt, row, way)
        for row, (prompt, way) in enumerate(zip(prompts, ways, strict=True))
    ]


def make_engine(kind: Engine, model: str, batch: int) -> RolloutEngine:
    rollout = RolloutConfig(engine=kind, max_rows=batch)
    return build_engine(Device("0"), Rank(), model=ModelConfig(path=model), rollout=rollout)


def generate(engine: RolloutEngine, requests: list[GenerationRequest]) -> list[Generation]:
    queue = LocalQueue[Generation](requests)
    engine.serve(queue)
    return queue.results()


def measure(
    engines: dict[Engine, RolloutEngine], requests: list[GenerationRequest], rounds: int
) -> tuple[dict[Engine, list[float]], int]:
    """Tokens a second of each round, and the tokens of one."""
    rates: dict[Engine, list[float]] = {kind: [] for kind in engines}
    expected: list[list[int]] | None = None
    for _ in range(rounds):
        for kind, engine in engines.items():
            began = time.perf_counter()
            samples = generate(engine, requests)
            seconds = time.perf_counter() - began
            tokens = [sample.token_ids for sample in samples]
            alike = expected is None or np.mean(
                [one == other for one, other in zip(tokens, expected, strict=True)]
            )
            assert alike > 0.95, f"{kind} drew other tokens: {alike:.0%} of the rows are the same"
            expected = tokens
            rates[kind].append(sum(map(len, tokens)) / seconds)
            print(
                f"{kind}: {rates[kind][-1]:.0f} tokens/s, {seconds:.1f} s, rows as before: "
                f"{float(alike):.1%}"
            )
    return rates, sum(map(len, expected or []))


def report(
    rates: dict[Engine, list[float]], tokens: int, parameters: int, given: argparse.Namespace
) -> str:
    middle = {kind: statistics.median(values) for kind, values in rates.items()}
    lines = [
        "# Engines: tokens a second",
        "",
        f"`python benchmarks/engines.py --rows {given.rows} --batch {given.batch} --threads "
        f"{given.threads}` on {platform.machine()}, {given.threads} threads, torch "
        f"{torch.__version__}: {parameters / 1e6:.1f} million parameters, {given.rows} rows, "
        f"{tokens} tokens, lengths log-normal (median {MEDIAN}, sigma {SIGMA}, at most {LONGEST}), "
        f"{given.batch} rows at once, medians of {given.rounds} rounds in one process, one engine "
        "after the other.",
        "",
        "| engine | tokens/s | of transformers' |",
        "|---|---|---|",
        *(
            f"| {kind} | {rate:.0f} | {rate / middle[Engine.transformers]:.2f} |"
            for kind, rate in middle.items()
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
