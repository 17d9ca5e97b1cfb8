"""Storing the rows of each step costs time: seconds a step with ``storage.durability`` none, async
and sync.

With async also without the stage, that is with the rows stored once, at the end of the step.

    python benchmarks/durability.py [--rounds 3] [--steps 8] [--out docs/benchmarks/durability.md]

Two cases on one machine: the quickstart, and 256 rows of 64k tokens (ids and two log-probs, 201 MB)
whose step computes for some seconds between the stage and the saved table. The levels take turns;
each step's seconds are compared with those of the same step of the same round without durability.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from siirl_dask.config.file import load, load_config_file, shipped
from siirl_dask.context import Context
from siirl_dask.driver.phases import dags, prepare
from siirl_dask.driver.run import run
from siirl_dask.planner import DAG, Node, Role, columns
from siirl_dask.schema import (
    ANSWER,
    OLD_LOGPROBS,
    RESPONSE_IDS,
    ROLLOUT_LOGPROBS,
    TOKENS,
    TYPES,
    fields,
)
from siirl_dask.testing.rows import build_nothing

LEVELS = {
    "none": ("none", False),
    "async, no stage": ("async", False),
    "async": ("async", True),
    "sync": ("sync", True),
}
"""``storage.durability``, and whether rows are a stage as soon as they are made."""
LONG = (RESPONSE_IDS, ROLLOUT_LOGPROBS, OLD_LOGPROBS)
_ONE_SHARED = (
    "cluster.workers=2",
    "checkpoint.every=0",
    "validation.url=null",
    "validation.test_url=null",
)


@columns(reads=[ANSWER], writes=fields(*LONG), new_rows=True)
def make_long_rows(ctx: Context, table: pa.Table, *, tokens: int) -> pa.Table:
    """Return the prompts with ``tokens`` tokens each, of random ids and log-probs: they do not
    compress.
    """
    rows, draw = table.num_rows, np.random.default_rng(ctx.step)
    ends = np.arange(rows + 1, dtype=np.int64) * tokens
    values = {name: draw.standard_normal(rows * tokens, dtype=np.float32) for name in LONG[1:]}
    values[RESPONSE_IDS] = draw.integers(0, 150_000, rows * tokens, dtype=np.int32)
    table = table.set_column(
        table.column_names.index(TOKENS), TOKENS, pa.array(np.full(rows, tokens))
    )
    for name in LONG:
        table = table.append_column(
            name, pa.LargeListArray.from_arrays(ends, values[name]).cast(TYPES[name])
        )
    return table


@columns(reads=[RESPONSE_IDS])
def compute(ctx: Context, table: pa.Table, *, seconds: float) -> pa.Table:
    """Keep a core busy, as an update does."""
    until, matrix = time.monotonic() + seconds, torch.randn(256, 256)
    while time.monotonic() < until:
        matrix = torch.tanh(matrix @ matrix)
    return table


def long_dag(tokens: int, seconds: float, stage: bool) -> DAG:
    nodes = (
        Node("make", partial(make_long_rows, tokens=tokens), role="policy", stage=stage),
        Node(
            "compute",
            partial(compute, seconds=seconds),
            role="policy",
            after="make",
            save_as="rollouts",
        ),
    )
    return DAG((Role("policy", build_nothing),), nodes)


def seconds_of(url: Path) -> list[float]:
    """Return the seconds of each training step but the first, which warms up."""
    lines = [json.loads(line) for line in (url / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines if line["phase"] == "train"][1:]


def run_quickstart(folder: Path, level: str, steps: int) -> list[float]:
    url, (durability, stage) = folder / "run", LEVELS[level]
    given = [
        f"run.url={url}",
        f"run.steps={steps + 1}",
        f"storage.durability={durability}",
        "observe.progress=false",
    ]
    given += [f"nodes.rollout.stage={str(stage).lower()}"]
    task = [
        f"data.url={folder}/task/train.parquet",
        f"model.path={folder}/task/model",
        "rollout.engine=transformers",
    ]
    file = load_config_file(
        shipped("quickstart.yaml"), [*given, *task, *_ONE_SHARED, "cluster.placement={}"]
    )
    prepare(file.config)
    run(file.config, *dags(file), fresh=True)
    return seconds_of(url)


def run_long(
    folder: Path, level: str, steps: int, rows: int, tokens: int, seconds: float
) -> list[float]:
    data, url, (durability, stage) = folder / "data.parquet", folder / "run", LEVELS[level]
    texts = [f"prompt {row}" for row in range(rows * (steps + 1))]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), data, row_group_size=64)
    given = [
        f"run.url={url}",
        f"run.steps={steps + 1}",
        f"storage.durability={durability}",
        "observe.progress=false",
    ]
    place = [f"data.url={data}", "data.prepare=null", f"data.batch_size={rows}", "run.lookahead=1"]
    config = load(
        shipped("quickstart.yaml"),
        [*given, *place, *_ONE_SHARED, "cluster.placement={policy: [0, 1]}"],
    )
    run(config, long_dag(tokens, seconds, stage), fresh=True)
    return seconds_of(url)


def row_of(name: str, found: dict[str, list[float]]) -> str:
    cells = [f"{median(found['none']):.2f}"]
    for level in [*LEVELS][1:]:
        ratios = [mine / bare for mine, bare in zip(found[level], found["none"], strict=True)]
        cells.append(
            f"{median(found[level]):.2f} ({median(ratios):.2f}x, {min(ratios):.2f} to "
            f"{max(ratios):.2f})"
        )
    return f"| {name} | {' | '.join(cells)} |"


def report(rows: Sequence[str], given: argparse.Namespace, load_average: float) -> str:
    return "\n".join(
        [
            "# What durability costs",
            "",
            f"`python benchmarks/durability.py --rounds {given.rounds} --steps {given.steps}` on "
            f"{platform.machine()}, two cores, a local disk, load {load_average:.1f}. Two workers, "
            "each level in turn. Median seconds of a step, and in brackets how many times as long "
            "as the same step of the same round without durability, with the range.",
            "",
            f"| case | {' | '.join(LEVELS)} |",
            f"|---{'|---' * len(LEVELS)}|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="that a long step computes before it saves"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    cases = {
        "quickstart": partial(run_quickstart, steps=given.steps),
        f"{given.rows} x {given.tokens // 1024}k": partial(
            run_long, steps=given.steps, rows=given.rows, tokens=given.tokens, seconds=given.seconds
        ),
    }
    rows = []
    with TemporaryDirectory() as name:
        for case, one in cases.items():
            found: dict[str, list[float]] = {level: [] for level in LEVELS}
            for _ in range(given.rounds):
                for level in LEVELS:
                    found[level] += one(Path(name), level)
            rows.append(row_of(case, found))
            print(rows[-1], flush=True)
    text = report(rows, given, os.getloadavg()[0])
    print(text) if given.out is None else given.out.write_text(text)


if __name__ == "__main__":
    main()
