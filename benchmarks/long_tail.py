"""Idle time of workers that generate rows with a long tail of lengths: as the prompts were loaded,
shared by expected length, taking over from one another, and both.

    python benchmarks/long_tail.py [--engine transformers vllm] [--steps 6] [--out FILE]

A run of its own for each case: two workers, and prompts whose responses have lengths from a
log-normal distribution, which no worker knows before they end. What is expected of them is wrong by
a factor, log-normal too. Idle is what a worker, on average, waits for the one that is busy longest.
The samples are held against each other: they must not depend on who made them.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from siirl_storage import open_table

from generation import LONGEST, MEDIAN, SIGMA, endless_model, long_tailed, two_workers
from siirl_dask.config import Config
from siirl_dask.config.file import load, shipped
from siirl_dask.context import Context
from siirl_dask.driver.run import run
from siirl_dask.nodes import encode_prompts, generate
from siirl_dask.observe import read_metrics
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.rollout import build_engine

_PROMPTS, _SAMPLES, _BATCH = 16, 8, 8
# sigma of the factor by which expectations are wrong: a third of them by more than 1.6
_WRONG = 0.5
_SIZES = {
    "hidden": 256,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "intermediate": 768,
}


@dataclass(frozen=True)
class Case:
    engine: str
    expecting: bool
    taking: bool
    idle: list[float]
    """Share of the busiest worker's time, by step."""
    seconds: float
    """Mean seconds of generation in a step."""
    taken_over: float
    """Rows a step."""
    samples: list[list[int]]


@columns(reads=["length"], writes={"max_tokens": pa.int32()})
def end_there(ctx: Context, table: pa.Table) -> pa.Table:
    """Responses get their lengths when it is settled who samples them, and when."""
    return table.append_column("max_tokens", table["length"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="+", default=["transformers"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model, parameters = endless_model(Path(folder, "model"), **_SIZES)
        data = make_data(Path(folder, "data.parquet"), given.steps + 1)
        cases = [
            measure(
                folder, model, data, engine, expecting=expecting, taking=taking, steps=given.steps
            )
            for engine, taking, expecting in product(given.engine, (False, True), (False, True))
        ]
    check(cases)
    text = report(cases, parameters, given.steps)
    Console().print(text)
    if given.out:
        given.out.write_text(text)


def make_data(path: Path, steps: int) -> str:
    rows = _PROMPTS * steps
    prompts = [f"prompt {row}" for row in range(rows)]
    lengths = pa.array(long_tailed(rows), pa.int32())
    factors = np.random.default_rng(1).lognormal(0, _WRONG, rows)
    expected = pa.array(np.maximum(1, lengths.to_numpy() * factors).astype(np.int64))
    data = {"prompt": prompts, "answer": prompts, "length": lengths, "expected": expected}
    pq.write_table(pa.table(data), path, row_group_size=64)
    return str(path)


def measure(
    folder: str, model: str, data: str, engine: str, *, expecting: bool, taking: bool, steps: int
) -> Case:
    url = str(Path(folder, f"{engine}-{expecting}-{taking}"))
    values = {
        "run.steps": steps + 1,
        "data.url": data,
        "data.batch_size": _PROMPTS,
        "model.path": model,
        "rollout.engine": engine,
        "rollout.n": _SAMPLES,
        "rollout.max_rows": _BATCH,
        "rollout.max_response_length": LONGEST,
        "rollout.work_stealing": taking,
        "rollout.expected_length_column": "expected" if expecting else "null",
    }
    config = load(shipped("quickstart.yaml"), two_workers(url, values))
    run(config, generation(config))
    records = read_metrics(url)[1:]  # the first step warms up
    busy = [record["metrics"]["rollout/busy_seconds"] or 0.0 for record in records]
    longest = [record["metrics"]["rollout/longest_busy_seconds"] or 1.0 for record in records]
    idle = [1 - some / most for some, most in zip(busy, longest, strict=True)]
    taken = mean(record["metrics"]["rollout/taken_over"] or 0.0 for record in records)
    rows = (
        open_table(f"{url}/rollouts/step={steps + 1:06d}")
        .to_table(["row_id", "response_ids"])
        .sort_by("row_id")
    )
    return Case(
        engine, expecting, taking, idle, mean(longest), taken, rows["response_ids"].to_pylist()
    )


def generation(config: Config) -> DAG:
    rollout = config.rollout
    encode = partial(
        encode_prompts, max_prompt_length=config.data.max_prompt_length, rollout=rollout
    )
    nodes = (
        Node("prompts", encode, role="rollout"),
        Node(
            "lengths",
            end_there,
            role="rollout",
            after="prompts",
            rows=Rows(rollout.prompt_placement),
        ),
        Node(
            "rollout",
            partial(generate, rollout=rollout),
            role="rollout",
            after="lengths",
            save_as="rollouts",
        ),
    )
    return DAG(
        (Role("rollout", partial(build_engine, model=config.model, rollout=rollout)),), nodes
    )


def check(cases: Sequence[Case]) -> None:
    for engine in {case.engine for case in cases}:
        first, *others = (case.samples for case in cases if case.engine == engine)
        alike = min(mean(a == b for a, b in zip(first, other, strict=True)) for other in others)
        assert alike > 0.98, f"{engine}: {alike:.0%} of the rows are the same whoever samples them"


def report(cases: Sequence[Case], parameters: int, steps: int) -> str:
    lines = [
        "# Long tails: idle time of workers that generate",
        "",
        f"`python benchmarks/long_tail.py` on {platform.machine()}: two workers of one thread, "
        f"{_PROMPTS} prompts a step, {_SAMPLES} samples each, {_BATCH} rows at once, {steps} steps "
        f"after one that warms up; a model of {parameters / 1e6:.1f} million parameters; lengths "
        f"log-normal (median {MEDIAN}, sigma {SIGMA}, at most {LONGEST}), expected ones wrong by a "
        f"log-normal factor (sigma {_WRONG}).",
        "",
        "| engine | `expected_length` | `work_stealing` | idle | longest worker, s a step | rows "
        "taken over a step |",
        "|---|---|---|---|---|---|",
        *map(_line, cases),
        "",
        "Idle is the share of the busiest worker's time for which a worker has nothing to do, on "
        "average over workers; mean of the steps, plus or minus their standard deviation. The "
        "samples are the same in all cases.",
        "",
    ]
    return "\n".join(lines)


def _line(case: Case) -> str:
    expecting, taking = ("yes" if on else "no" for on in (case.expecting, case.taking))
    idle = f"{mean(case.idle):.1%} ± {stdev(case.idle):.1%}"
    return (
        f"| {case.engine} | {expecting} | {taking} | {idle} | {case.seconds:.2f} | "
        f"{case.taken_over:.1f} |"
    )


if __name__ == "__main__":
    main()
