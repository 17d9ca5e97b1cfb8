"""Times the ready questions to a run of a given number of steps, and the verification of its files.

    python benchmarks/questions.py --steps 150 --folder /tmp/asked

A step has 512 samples of 64 prompts on four workers. Responses have 800 tokens on average; token
ids, log-probs and words are random, so that they compress as little as those of a model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
from siirl_storage import commit_parts, stage_part

from siirl_dask.runs.check.tables import check_tables
from siirl_dask.runs.samples import questions
from siirl_dask.runs.samples.mismatch import mismatch
from siirl_dask.runs.samples.rollouts import open_rollouts
from siirl_dask.schema import make_schema

WORKERS, PROMPTS, SAMPLES, LONGEST, PROMPT = 4, 16, 8, 4096, 200
WORDS = np.array([f"w{number:04d}" for number in range(2000)])
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--folder", help="keep the run there, and take the one that is there; default: a new one"
    )
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        url = given.folder or folder
        if not Path(url, "rollouts").exists():
            make_run(url, given.steps)
        report(url, given.steps)


def make_run(url: str, steps: int) -> None:
    """Write the rollouts of a run."""
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        folder = f"{url}/rollouts/step={step:06d}"
        parts = [
            stage_part(folder, 1, worker, rows(rng, step, worker, steps))
            for worker in range(WORKERS)
        ]
        commit_parts(folder, 1, parts)


def rows(rng: np.random.Generator, step: int, worker: int, steps: int) -> pa.Table:
    """Return a worker's samples of a step."""
    count = PROMPTS * SAMPLES
    lengths = np.minimum(rng.geometric(1 / 800, count), LONGEST)
    group = np.repeat(np.arange(PROMPTS), SAMPLES) + worker * PROMPTS
    number = (step - 1) * WORKERS * PROMPTS + group
    row = number % (epoch(steps) * WORKERS * PROMPTS)
    logprobs = -rng.exponential(1.0, lengths.sum()).astype("f4")
    drift = rng.normal(0, 0.01, lengths.sum()).astype("f4")
    prompts = np.repeat(rng.integers(0, 32_000, (PROMPTS, PROMPT)), SAMPLES, axis=0).reshape(-1)
    columns = {
        "row_id": np.arange(count) + worker * count,
        "group_id": group,
        "tokens": lengths + PROMPT,
        "prompt_number": number,
        "data_part": np.zeros(count, "i4"),
        "data_row": row,
        "answer": row.astype(str),
        "source": np.array(["gsm8k", "math", "code"])[row % 3],
        "prompt_ids": lists(np.full(count, PROMPT), prompts.astype("i4")),
        "prompt_text": np.array([f"question {one} " * 20 for one in row]),
        "sample_number": np.tile(np.arange(SAMPLES, dtype="i4"), PROMPTS),
        "sampling_seed": rng.integers(0, 2**62, count),
        "response_ids": lists(lengths, rng.integers(0, 32_000, lengths.sum()).astype("i4")),
        "response": [" ".join(rng.choice(WORDS, int(0.7 * length))) for length in lengths],
        "rollout_logprobs": lists(lengths, logprobs),
        "finish_reason": np.where(lengths == LONGEST, "length", "stop"),
        "weights_version": np.full(count, step - 1),
        "worker": np.full(count, str(worker)),
        "reward": (rng.random(count) < 0.3 + 0.5 * step / steps).astype("f4"),
        "old_logprobs": lists(lengths, logprobs + drift),
    }
    table = pa.table(columns)
    return table.cast(make_schema({field.name: field.type for field in table.schema}))


def epoch(steps: int) -> int:
    """Return the steps after which the prompts come again: half of all."""
    return max(1, steps // 2)


def lists(lengths: Any, values: Any) -> pa.Array:
    """Return a column of lists with these lengths."""
    return pa.LargeListArray.from_arrays(
        pa.array(np.concatenate([[0], np.cumsum(lengths)])), pa.array(values)
    )


def report(url: str, steps: int) -> None:
    """Print a table of the seconds that each question takes, the best of a few times."""
    files = {
        path.relative_to(url).as_posix(): path.stat().st_size for path in Path(url).rglob("*.*")
    }
    with open_rollouts(url) as rollouts:
        size = rollouts.table(
            f"SELECT sum(tokens) AS tokens, count(*) AS rows FROM {rollouts.view}"
        ).to_pylist()[0]
        print(
            f"{steps} steps, {size['rows']:,} rows, {size['tokens']:,} tokens, "
            f"{sum(files.values()):,} bytes\n"
        )
        asked: dict[str, Callable[[], object]] = {
            "open": partial(opened, url),
            "no question: count and mean reward of each step": partial(
                questions.overview, rollouts
            ),
            "--worst": partial(questions.worst, rollouts),
            "--best": partial(questions.best, rollouts),
            "--by source": partial(questions.by, rollouts, "source"),
            "--zero-variance": partial(questions.zero_variance, rollouts),
            "--lengths": partial(questions.lengths, rollouts),
            "--diff": partial(questions.diff, rollouts, 1, 1 + epoch(steps)),
            "--mismatch": partial(mismatch, rollouts),
            "check": partial(check_tables, rollouts.fs, url, files, 0, (), lambda nbytes: None),
        }
        print("| question | seconds | of a processor |\n|---|---|---|")
        for name, ask in asked.items():
            seconds, processor = min(timed(ask) for _ in range(ROUNDS))
            print(f"| {name} | {seconds:.2f} | {processor:.2f} |", flush=True)


def opened(url: str) -> None:
    """Open the samples, and close them."""
    with open_rollouts(url):
        pass


def timed(ask: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds that a call takes, and those of processors."""
    began, processor = time.perf_counter(), time.process_time()
    ask()
    return time.perf_counter() - began, time.process_time() - processor


if __name__ == "__main__":
    main()
