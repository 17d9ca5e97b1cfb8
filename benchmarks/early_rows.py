"""Measures the seconds that a step waits for rows after the last one is made, with and without
prefetch.

    python benchmarks/early_rows.py [--rows 1024] [--gbit 1] [--seconds 10] [--out FILE]

Four hosts of the lab (see ``siirl_dask.testing.hosts``): two make rows, two take them. No model is
needed: rows of long-tailed lengths, up to 64k tokens, end one after the other, as they would in an
engine that gives each as many tokens a second. What is read is the time from the end of the last
row to the first and the second node that needs rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from siirl_dask.config.file import load, shipped
from siirl_dask.context import Context, Reduce
from siirl_dask.driver.run import run
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.schema import (
    ANSWER,
    GROUP_ID,
    RESPONSE_IDS,
    REWARD,
    ROLLOUT_LOGPROBS,
    ROW_ID,
    TOKENS,
    TYPES,
    fields,
)
from siirl_dask.testing.hosts import DaskCluster, Lab, Links
from siirl_dask.testing.rows import build_nothing

LONGEST, MEDIAN, SIGMA, SAMPLES = 65_536, 16_384, 0.9, 16
EARLY = (RESPONSE_IDS, ROLLOUT_LOGPROBS)
CASES = {"balanced without preference": "none", "prefetch off": "off", "prefetch on": "on"}
MOVED = {"first": "bytes/peers", "early": "bytes/early"}


def rows_of(table: pa.Table, seed: int) -> tuple[pa.Table, np.ndarray]:
    """Return SAMPLES rows for each prompt, and their lengths."""
    ids = table[ROW_ID].to_numpy().repeat(SAMPLES) * SAMPLES + np.tile(
        np.arange(SAMPLES), table.num_rows
    )
    rows = table.take(np.repeat(np.arange(table.num_rows), SAMPLES))
    draws = [np.random.default_rng((seed, row)).normal() for row in ids.tolist()]
    lengths = np.minimum(MEDIAN * np.exp(SIGMA * np.array(draws)), LONGEST).astype(np.int64)
    rows = rows.set_column(rows.column_names.index(ROW_ID), ROW_ID, pa.array(ids))
    return rows.set_column(rows.column_names.index(TOKENS), TOKENS, pa.array(lengths)), lengths


def with_samples(rows: pa.Table, lengths: np.ndarray) -> pa.Table:
    """Add token ids and log-probs of these lengths."""
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    for name, dtype in zip(EARLY, (np.int32, np.float32), strict=True):
        values = (np.arange(ends[-1]) % 50_000).astype(dtype)
        rows = rows.append_column(name, pa.ListArray.from_arrays(ends, values).cast(TYPES[name]))
    return rows


def sample(ctx: Context, table: pa.Table, *, seconds: float) -> pa.Table:
    """Rows of ``LONGEST`` tokens end after ``seconds``, shorter ones as much earlier."""
    began = time.time()
    rows, lengths = rows_of(table, ctx.step)
    made: dict[int, pa.Table] = {}
    for at in np.argsort(lengths, kind="stable").tolist():
        time.sleep(max(0.0, began + seconds * int(lengths[at]) / LONGEST - time.time()))
        made[at] = with_samples(rows.slice(at, 1), lengths[at : at + 1])
        if ctx.hand_over is not None:
            ctx.hand_over(made[at].select([ROW_ID, GROUP_ID, *EARLY]))
    ctx.log("time/made", time.time(), Reduce.MAX)
    return pa.concat_tables([made[at] for at in range(rows.num_rows)]).combine_chunks()


@columns(reads=[ANSWER], writes=fields(*EARLY), early=EARLY, new_rows=True)
def sample_early(ctx: Context, table: pa.Table, *, seconds: float) -> pa.Table:
    return sample(ctx, table, seconds=seconds)


@columns(reads=[ANSWER], writes=fields(*EARLY), new_rows=True)
def sample_whole(ctx: Context, table: pa.Table, *, seconds: float) -> pa.Table:
    return sample(ctx, table, seconds=seconds)


@columns(reads=[ANSWER], writes=fields(REWARD))
def score(ctx: Context, table: pa.Table) -> pa.Table:
    return table.append_column(REWARD, pa.array(np.ones(table.num_rows), TYPES[REWARD]))


@columns(reads=[RESPONSE_IDS], writes={"first": pa.int64()})
def first_need(ctx: Context, table: pa.Table) -> pa.Table:
    ctx.log("time/first", time.time(), Reduce.MAX)
    return table.append_column("first", table[TOKENS])


@columns(reads=[RESPONSE_IDS, ROLLOUT_LOGPROBS, REWARD, "first"])
def second_need(ctx: Context, table: pa.Table) -> pa.Table:
    ctx.log("time/second", time.time(), Reduce.MAX)
    return table


def dag(case: str, seconds: float) -> DAG:
    make = sample_whole if case == "none" else sample_early
    roles = (Role("rollout", build_nothing), Role("policy", build_nothing))
    nodes = (
        Node("rollout", partial(make, seconds=seconds), role="rollout"),
        Node("reward", score, role="rollout", after="rollout"),
        Node("logprobs", first_need, role="policy", after="rollout", rows=Rows.BALANCED),
        Node(
            "advantage", second_need, role="policy", after=("reward", "logprobs"), rows=Rows.GROUPED
        ),
    )
    return DAG(roles, nodes)


def measure(folder: Path, address: str, case: str, given: argparse.Namespace) -> None:
    """Run on the cluster; called on a host of the lab."""
    prefetch = {"none": "null", "off": "false", "on": "null"}[case]
    overrides = [
        f"run.url={folder / case}",
        f"run.steps={given.steps + 1}",
        f"cluster.address={address}",
        "cluster.workers=4",
        "cluster.placement={rollout: [0, 1], policy: [2, 3]}",
        f"data.url={folder / 'data.parquet'}",
        "data.prepare=null",
        f"data.batch_size={given.rows // SAMPLES}",
        f"data.prefetch={prefetch}",
        f"data.memory_limit={given.memory}",
        "checkpoint.every=0",
        "validation.url=null",
        "validation.test_url=null",
        "observe.progress=false",
        "run.lookahead=1",
    ]
    run(load(shipped("quickstart.yaml"), overrides), dag(case, given.seconds))


def results(folder: Path, case: str) -> dict[str, list[float]]:
    """Return seconds from the last row to either node, and megabytes, step by step; the first
    step warms up.
    """
    lines = [
        json.loads(line) for line in (folder / case / "metrics.jsonl").read_text().splitlines()
    ][1:]
    found = [line["metrics"] for line in lines if line["phase"] == "train"]
    return {
        "first": [step["time/first"] - step["time/made"] for step in found],
        "second": [step["time/second"] - step["time/made"] for step in found],
        "peers": [step["bytes/peers"] / 1e6 for step in found],
        "early": [step["bytes/early"] / 1e6 for step in found],
    }


def report(cases: Mapping[str, Mapping[str, Sequence[float]]], given: argparse.Namespace) -> str:
    def cell(values: Sequence[float]) -> str:
        return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"

    lines = [
        "# Rows that travel early",
        "",
        f"`python benchmarks/early_rows.py` on {platform.machine()}, two cores for all: two hosts "
        f"of the lab make {given.rows} rows a step, two others take them, over links of "
        f"{given.gbit:g} Gbit/s. Lengths are log-normal (median {MEDIAN:,} tokens, sigma {SIGMA}, "
        f"at most {LONGEST:,}), 8 bytes a token; the longest rows take {given.seconds:g} s, "
        f"shorter ones as much less. Medians of {given.steps} steps, with their range.",
        "",
        "| | s from the last row to the first node | s to the node that joins | MB in all | MB "
        "before the last row |",
        "|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        row = cases[case]
        cells = (
            cell(row["first"]),
            cell(row["second"]),
            f"{median(row['peers']):.0f}",
            f"{median(row['early']):.0f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    hidden = median(cases["off"]["second"]) - median(cases["on"]["second"])
    before = median(cases["none"]["second"]) - median(cases["on"]["second"])
    lines += [
        "",
        f"Prefetch hides {hidden:.2f} s a step, and {before:.2f} s with what preferences save. "
        "Without preference rows are balanced by their lengths alone, as rows that nobody hands "
        "over are: then whole groups, which the second node wants, move once more between the "
        "workers that learn.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--memory", default="2GiB", help="data.memory_limit")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--on", nargs=3, metavar=("FOLDER", "ADDRESS", "CASE"), help=argparse.SUPPRESS
    )
    given = parser.parse_args()
    if given.on:
        measure(Path(given.on[0]), given.on[1], given.on[2], given)
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [f"prompt {row}" for row in range(given.rows // SAMPLES * (given.steps + 1))]
        pq.write_table(
            pa.table({"prompt": prompts, "answer": prompts}),
            folder / "data.parquet",
            row_group_size=16,
        )
        for case in CASES.values():
            with Lab(4, links=Links(bits_per_second=given.gbit * 1e9)) as lab:
                cluster = DaskCluster(lab.hosts[0], lab.hosts, folder)
                options = (
                    f"--{key}={getattr(given, key)}"
                    for key in ("rows", "seconds", "steps", "memory")
                )
                process = cluster.run(
                    lab.hosts[0], __file__, *options, "--on", folder, cluster.address, case
                )
                out, _ = process.communicate()
                if process.returncode:
                    sys.exit(f"{case}: {out}")
        text = report({case: results(folder, case) for case in CASES.values()}, given)
    print(text) if given.out is None else given.out.write_text(text)


if __name__ == "__main__":
    main()
