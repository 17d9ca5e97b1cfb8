"""Tokens a second of vLLM with our sampler (``rollout.sampler=exact``) and with its own, at a large
vocabulary.

    python benchmarks/samplers.py [--rows 64] [--batch 64] [--rounds 5] [--threads 1] [--out FILE]

A model of 32 million random parameters, most of them embeddings of 152 thousand tokens, generates
rows of equal length, which no token ends. Each sampler has an engine in a process of its own, and
their rounds alternate: only one computes. Seconds are those that the process computed, and so
nearly the same on a machine that does other work as well.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time

import numpy as np
import torch
from rich.console import Console

from generation import endless_model
from sections import replace_section
from siirl_dask.config import Engine, ModelConfig, RolloutConfig, Sampler
from siirl_dask.context import Device, Rank
from siirl_dask.rollout import GenerationRequest, LocalQueue, RolloutEngine, Sampling, build_engine

_VOCABULARY = 151_936  # Qwen2.5's
_PROMPT, _RESPONSE = 16, 16  # tokens
_SIZES = {
    "hidden": 128,
    "layers": 16,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 1536,
    "vocabulary": _VOCABULARY,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64, help="rows at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="page whose section is replaced")
    parser.add_argument(
        "--serve",
        nargs=2,
        metavar=("SAMPLER", "MODEL"),
        help="one round for each line of the input",
    )
    given = parser.parse_args()
    if given.serve:
        serve(Sampler(given.serve[0]), given.serve[1], given)
        return
    with TemporaryDirectory() as folder:
        model, parameters = endless_model(Path(folder, "model"), **_SIZES)
        rates = measure(model, given)
    text = section(rates, parameters, given)
    Console().print(text)
    if given.out:
        replace_section(given.out, text)


def serve(sampler: Sampler, model: str, given: argparse.Namespace) -> None:
    """Print the seconds of a round for each line that comes."""
    torch.set_num_threads(given.threads)
    rollout = RolloutConfig(engine=Engine.vllm, max_rows=given.batch, sampler=sampler)
    engine = build_engine(Device("0"), Rank(), model=ModelConfig(path=model), rollout=rollout)
    generate(engine, given.batch, given)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(generate(engine, given.rows, given), flush=True)
    engine.close()


def generate(engine: RolloutEngine, rows: int, given: argparse.Namespace) -> float:
    """Return the CPU seconds in which so many rows are generated."""
    prompts = np.random.default_rng(1).integers(0, 256, (rows, _PROMPT)).tolist()
    way = Sampling(max_tokens=_RESPONSE, top_p=given.top_p)
    queue = LocalQueue([GenerationRequest(prompt, row, way) for row, prompt in enumerate(prompts)])
    began = process_time()
    engine.serve(queue)
    seconds = process_time() - began
    assert all(
        len(sample.token_ids) == len(sample.logprobs) == _RESPONSE for sample in queue.results()
    )
    return seconds


def measure(model: str, given: argparse.Namespace) -> dict[Sampler, list[float]]:
    """Tokens a second of each round."""
    rates: dict[Sampler, list[float]] = {sampler: [] for sampler in Sampler}
    command = [sys.executable, *sys.argv, "--threads", str(given.threads), "--serve"]
    engines = {sampler: start([*command, sampler, model], given.threads) for sampler in rates}
    try:
        for engine in engines.values():
            while "ready" not in answer(engine):
                pass
        for number in range(given.rounds):
            order = list(engines) if number % 2 else list(engines)[::-1]
            for sampler in order:
                seconds = float(ask(engines[sampler]))
                rates[sampler].append(given.rows * _RESPONSE / seconds)
                print(f"{sampler}: {rates[sampler][-1]:.0f} tokens/s")
    finally:
        for engine in engines.values():
            engine.communicate()
    return rates


def start(command: list[str], threads: int) -> subprocess.Popen[str]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment)


def ask(engine: subprocess.Popen[str]) -> str:
    assert engine.stdin is not None
    engine.stdin.write("round\n")
    return answer(engine)


def answer(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    line = engine.stdout.readline()
    assert line, "an engine ended"
    return line


def section(rates: dict[Sampler, list[float]], parameters: int, given: argparse.Namespace) -> str:
    names = ("rows", "batch", "rounds", "threads", *(("top_p",) if given.top_p < 1 else ()))
    arguments = " ".join(f"--{name.replace('_', '-')} {getattr(given, name)}" for name in names)
    own = statistics.median(rates[Sampler.vllm])
    lines = [
        "## Samplers at a vocabulary of 152 thousand",
        "",
        f"`python benchmarks/samplers.py {arguments}` on {date.today():%d %B %Y}: "
        f"{platform.machine()}, {given.threads} threads, torch {torch.__version__}. "
        f"{parameters / 1e6:.1f} million parameters, a vocabulary of {_VOCABULARY:,}, {given.rows} "
        f"rows of {_PROMPT} + {_RESPONSE} tokens, {given.batch} at once, top_p {given.top_p}; vLLM "
        f"in two processes whose {given.rounds} rounds alternate. The ratio is that of medians; in "
        "brackets, of each pair of rounds.",
        "",
        "| `rollout.sampler` | tokens a CPU second, median | range | over vLLM's own |",
        "|---|---:|---:|---|",
    ]
    for sampler, values in rates.items():
        pairs = [one / other for one, other in zip(values, rates[Sampler.vllm], strict=True)]
        lines.append(
            f"| {sampler} | {statistics.median(values):.0f} | {min(values):.0f} to "
            f"{max(values):.0f} | "
            f"{statistics.median(values) / own:.2f} ({min(pairs):.2f} to {max(pairs):.2f}) |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
