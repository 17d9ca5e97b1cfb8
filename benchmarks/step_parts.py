"""Where a step's time goes: generation, log-probs, update, other nodes, moving, waiting, and Python within them.

    python benchmarks/step_parts.py [--sizes 0.3M 32M 150M] [--engine transformers vllm] [--steps 6] [--out FILE]

GRPO on two workers that both generate and learn, a torch thread each, with prompts of some 20 tokens and random models
whose responses all have the same length. A worker's clock is cut at the begin and the end of each node. Between two
nodes it waits until the last worker has ended the first of them; the rest is moving rows, and control. In every other
step torch's profiler counts the seconds inside operators; what is left of a node's seconds is Python. The profiler
slows both, so that the share of Python is of those steps alone, and all other figures are of the steps between.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from generation import endless_model
from siirl_dask import grpo
from siirl_dask.config import Config
from siirl_dask.config.file import load, shipped
from siirl_dask.driver.run import run
from siirl_dask.planner import DAG
from step_timing import FOLDER, TIMED

_PARTS = {"timed_generate": "generation", "timed_logprobs": "log-probs", "timed_update": "update"}
COLUMNS = (*_PARTS.values(), "other nodes", "waiting", "moving, control", "new weights")


@dataclass(frozen=True)
class Size:
    shape: Mapping[str, int]
    prompts: int
    tokens: int
    """Tokens of a response."""


SIZES = {
    "0.3M": Size({"hidden": 96, "layers": 3, "heads": 3, "kv_heads": 1, "head_dim": 32, "intermediate": 256}, 32, 12),
    "32M": Size({"hidden": 512, "layers": 10, "heads": 8, "kv_heads": 4, "head_dim": 64, "intermediate": 1536}, 16, 32),
    "150M": Size(
        {"hidden": 1024, "layers": 12, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 3072}, 8, 32
    ),
}
_SAMPLES = 8


@dataclass(frozen=True)
class Case:
    """Mean seconds of a step."""

    size: str
    parameters: int
    engine: str
    parts: Mapping[str, float]
    python: Mapping[str, float]
    """Share of a part's seconds outside of torch's operators; nothing for a part that ran none in its own thread."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--engine", nargs="+", choices=("transformers", "vllm"), default=["transformers", "vllm"])
    parser.add_argument("--steps", type=int, default=6, help="after two that warm up; half of them are profiled")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = []
    with TemporaryDirectory() as times:
        os.environ[FOLDER] = times  # once: workers are forked from a process that starts with the first case
        for size, engine in product(given.sizes, given.engine):
            with TemporaryDirectory() as folder:
                cases.append(measure(Path(folder), Path(times), size, engine, given.steps))
                print(line_of(cases[-1]), flush=True)
    text = report(cases, given.steps)
    print(text)
    if given.out:
        given.out.write_text(text)


def measure(folder: Path, times: Path, name: str, engine: str, steps: int) -> Case:
    size = SIZES[name]
    model, parameters = endless_model(folder / "random", **size.shape)
    for file in times.iterdir():
        file.unlink()
    data = make_prompts(folder / "data.parquet", size.prompts * (steps + 3))
    values = [
        f"run.url={folder}/run",
        f"run.steps={steps + 3}",
        f"data.url={data}",
        "data.prepare=null",
        f"model.path={model}",
        f"data.batch_size={size.prompts}",
        "cluster.workers=2",
        "cluster.placement={}",
        f"rollout.engine={engine}",
        f"rollout.n={_SAMPLES}",
        f"rollout.max_response_length={size.tokens}",
        "checkpoint.every=0",
        "validation.url=null",
        "validation.test_url=null",
        "observe.progress=false",
    ]
    config = load(shipped("quickstart.yaml"), values)
    run(config, timed_grpo(config))
    records = [json.loads(line) for file in times.iterdir() for line in file.read_text().splitlines()]
    return case_of(name, parameters, engine, [each for each in records if each["step"] > 1])


def make_prompts(path: Path, rows: int) -> Path:
    texts = [f"Sort: {' '.join(f'{row:05}')} =" for row in range(rows)]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), path, row_group_size=64)
    return path


def timed_grpo(config: Config) -> DAG:
    dag = grpo(config)
    for node in dag.nodes:
        if node.name in TIMED:
            dag = dag.replace(node.name, fn=TIMED[node.name])
    return dag


def case_of(name: str, parameters: int, engine: str, records: Iterable[Mapping[str, Any]]) -> Case:
    steps: dict[int, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        steps[record["step"]][record["worker"]].append(record)
    parts = [
        parts_of(workers, steps[step + 1])
        for step, workers in sorted(steps.items())
        if step % 2 == 0 and step + 1 in steps
    ]
    profiled = [record for workers in steps.values() for found in workers.values() for record in found]
    python = {part: share for node, part in _PARTS.items() if (share := python_share(node, profiled)) is not None}
    means = {part: mean(found[part] for found in parts) for part in COLUMNS}
    return Case(name, parameters, engine, means, python)


def parts_of(
    workers: Mapping[str, Sequence[Mapping[str, Any]]], after: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, float]:
    """Return the mean seconds of each part over the workers of one step; ``after`` are the records of the next."""
    sums = dict.fromkeys(COLUMNS, 0.0)
    ends = defaultdict(float)
    for record in (record for found in workers.values() for record in found):
        ends[record["node"]] = max(ends[record["node"]], record["ended"])
    for worker, found in workers.items():
        ordered = sorted(found, key=lambda record: record["began"])
        for record in ordered:
            sums[_PARTS.get(record["node"], "other nodes")] += record["ended"] - record["began"]
        for before, record in pairwise(ordered):
            ready = min(record["began"], ends[before["node"]])
            sums["waiting"] += ready - before["ended"]
            sums["moving, control"] += record["began"] - ready
        first = min(record["began"] for record in after[worker])
        ready = min(first, ends[ordered[-1]["node"]])
        sums["waiting"] += ready - ordered[-1]["ended"]
        sums["new weights"] += first - ready
    return {part: total / len(workers) for part, total in sums.items()}


def python_share(node: str, records: Iterable[Mapping[str, Any]]) -> float | None:
    found = [record for record in records if record["node"] == node and "operators" in record]
    inside = sum(record["operators"] for record in found)
    return 1 - inside / sum(record["ended"] - record["began"] for record in found) if inside else None


def line_of(case: Case) -> str:
    cells = []
    for part in COLUMNS:
        share = case.python.get(part)
        python = "" if share is None else f", {share:.0%} Python"
        cells.append(f"{case.parts[part]:.3f} ({case.parts[part] / case.seconds:.0%}{python})")
    size = SIZES[case.size]
    rows = f"{size.prompts * _SAMPLES} x {size.tokens}"
    return f"| {case.parameters / 1e6:.1f}M | {case.engine} | {rows} | {case.seconds:.2f} | {' | '.join(cells)} |"


def report(cases: Sequence[Case], steps: int) -> str:
    doc = (__doc__ or "").split("\n\n")
    return "\n".join(
        [
            "# Where a step's time goes",
            "",
            f"`python benchmarks/step_parts.py --steps {steps}` on {date.today():%d %B %Y}, {platform.machine()}, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
            "",
            doc[2].replace("\n", " "),
            "",
            f"| parameters | engine | rows x tokens | s a step | {' | '.join(COLUMNS)} |",
            f"|---|---|---|---:{'|---:' * len(COLUMNS)}|",
            *map(line_of, cases),
            "",
        ]
    )


if __name__ == "__main__":
    main()
