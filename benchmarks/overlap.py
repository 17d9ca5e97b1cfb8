"""Rewards that take time, begun while other responses are still generated, and after the last one
(``run.overlap``).

    python benchmarks/overlap.py [--engine transformers] [--steps 6] [--out FILE]

Two workers generate and score. Lengths are log-normal, known to no worker. Two rewards: a judge on
another machine that answers after a while, of which a worker asks a few at a time (async); and a
function that takes CPU time, in a process of each worker (``rewards.processes=1``). A run of its
own for each case; all must give the same rows and rewards.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import pyarrow as pa
from rich.console import Console
from siirl_storage import open_table

from generation import LONGEST, MEDIAN, SIGMA, endless_model, two_workers
from long_tail import end_there, make_data
from siirl_dask.config import Config
from siirl_dask.config.file import load, shipped
from siirl_dask.driver.run import run
from siirl_dask.nodes import encode_prompts, generate, score
from siirl_dask.observe import read_metrics
from siirl_dask.planner import DAG, Node, Role
from siirl_dask.rewards import RewardFn, build_scorer
from siirl_dask.rollout import build_engine

_PROMPTS, _SAMPLES, _BATCH = 16, 8, 8
# seconds until the judge answers, and rows that a worker asks about at a time
_ANSWER, _ASKED = (0.25, 8)
_COMPUTING = 0.03  # seconds of CPU time of the function
_SIZES = {
    "hidden": 128,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate": 384,
}


async def judge(prompt: str, response: str, answer: str) -> float:
    await asyncio.sleep(_ANSWER)
    return len(response) / LONGEST


def compute(prompt: str, response: str, answer: str) -> float:
    until = time.process_time() + _COMPUTING
    while time.process_time() < until:
        pass
    return len(response) / LONGEST


REWARDS: dict[str, tuple[RewardFn, str, dict[str, int]]] = {
    "judge": (
        judge,
        f"a judge: {_ANSWER} s, {_ASKED} at a time a worker",
        {"rewards.concurrency": _ASKED},
    ),
    "compute": (
        compute,
        f"a function: {_COMPUTING} s of CPU time, 1 process a worker",
        {"rewards.processes": 1},
    ),
}


@dataclass(frozen=True)
class Case:
    reward: str
    overlap: bool
    generation: list[float]
    """Seconds of the worker that generates longest, by step."""
    waiting: list[float]
    """Seconds from the last response to the last reward, of the worker that takes longest."""
    steps: list[float]
    """Seconds."""
    early: float
    """Rewards, in a step, that were there when the last response was."""
    rows: list[pa.Table]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model, parameters = endless_model(Path(folder, "model"), **_SIZES)
        data = make_data(Path(folder, "data.parquet"), given.steps + 1)
        cases = [
            measure(folder, model, data, given.engine, reward, overlap=overlap, steps=given.steps)
            for reward, overlap in product(REWARDS, (False, True))
        ]
    for off, on in zip(cases[::2], cases[1::2], strict=True):
        assert all(a.equals(b) for a, b in zip(off.rows, on.rows, strict=True)), (
            f"{off.reward}: other rows or rewards"
        )
    text = report(cases, given.engine, parameters, given.steps)
    Console().print(text)
    if given.out:
        given.out.write_text(text)


def measure(
    folder: str, model: str, data: str, engine: str, reward: str, *, overlap: bool, steps: int
) -> Case:
    url = str(Path(folder, f"{reward}-{overlap}"))
    function, _, options = REWARDS[reward]
    values = {
        "run.steps": steps + 1,
        "run.overlap": overlap,
        "data.url": data,
        "data.batch_size": _PROMPTS,
        "model.path": model,
        "rollout.engine": engine,
        "rollout.n": _SAMPLES,
        "rollout.max_rows": _BATCH,
        "rollout.max_response_length": LONGEST,
        **options,
    }
    config = load(shipped("quickstart.yaml"), two_workers(url, values))
    run(config, dag(config, function))
    records = read_metrics(url)[1:]  # the first step warms up

    def logged(name: str) -> list[float]:
        return [record["metrics"].get(name) or 0.0 for record in records]

    tables = [open_table(f"{url}/rollouts/step={step:06d}") for step in range(2, steps + 2)]
    rows = [
        table.to_table(["row_id", "response_ids", "reward"]).sort_by("row_id") for table in tables
    ]
    return Case(
        reward,
        overlap,
        logged("seconds/rollout"),
        logged("seconds/reward"),
        [record["seconds"] for record in records],
        median(logged("rows/scored_early")),
        rows,
    )


def dag(config: Config, reward: RewardFn) -> DAG:
    rollout = config.rollout
    encode = partial(
        encode_prompts, max_prompt_length=config.data.max_prompt_length, rollout=rollout
    )
    nodes = (
        Node("prompts", encode, role="rollout"),
        Node("lengths", end_there, role="rollout", after="prompts"),
        Node("rollout", partial(generate, rollout=rollout), role="rollout", after="lengths"),
        Node("reward", score, role="reward", after="rollout", save_as="rollouts"),
    )
    engine = partial(build_engine, model=config.model, rollout=rollout)
    scorer = partial(build_scorer, rewards=config.rewards, reward=reward)
    return DAG((Role("rollout", engine), Role("reward", scorer)), nodes)


def report(cases: Sequence[Case], engine: str, parameters: int, steps: int) -> str:
    lines = [
        "# Rewards during generation",
        "",
        f"`python benchmarks/overlap.py --engine {engine}` on {platform.machine()}, two cores: two "
        f"workers of one thread generate and score {_PROMPTS} prompts a step, {_SAMPLES} samples "
        f"each, {_BATCH} rows at once, with a model of {parameters / 1e6:.1f} million parameters; "
        f"lengths log-normal (median {MEDIAN}, sigma {SIGMA}, at most {LONGEST}). Medians of "
        f"{steps} steps after one that warms up, with their range; rows and rewards are the same "
        "in all steps, to the bit.",
        "",
        "| reward | `run.overlap` | generation, s | from the last response to the last reward, s "
        f"| step, s | rewards there by then, of {_PROMPTS * _SAMPLES} |",
        "|---|---|---|---|---|---|",
        *map(_line, cases),
        "",
    ]
    return "\n".join(lines)


def _line(case: Case) -> str:
    figures = (_range(case.generation), _range(case.waiting), _range(case.steps))
    on = "true" if case.overlap else "false"
    return f"| {REWARDS[case.reward][1]} | {on} | {' | '.join(figures)} | {case.early:.0f} |"


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
