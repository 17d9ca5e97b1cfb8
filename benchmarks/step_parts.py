"""Where a step's time goes: generation, log-probs, update, other nodes, moving, waiting, and Python within them.

    python benchmarks/step_parts.py [--sizes 0.3M 32M 150M] [--engine transformers vllm] [--steps 4] [--out FILE]

GRPO on two workers that both generate and learn, a torch thread each, with prompts of 17 tokens and random models whose
responses all have the same length. Seconds are those of the run's own trace (``siirl-dask trace``), on average over the
workers. In every other step torch's profiler counts the seconds inside operators; what is left of a node's is Python.
The profiler slows both, so that the share of Python is of those steps alone, and all other figures are of the steps
between.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq

from generation import endless_model, two_workers
from siirl_dask.config import Config
from siirl_dask.config.file import load, shipped
from siirl_dask.driver.run import run
from siirl_dask.observe import Record, read_metrics
from siirl_dask.observe.trace.bottleneck import WorkerTime, find_bottleneck
from siirl_dask.runs.trace import read_trace
from siirl_dask.trace import Lane
from step_timing import PYTHON, is_profiled, profiled_grpo

_NODES = {
    "rollout": "generation",
    "old_logprobs": "log-probs",
    "update": "update",
    "weights": "new weights",
    "load_weights": "new weights",
}
_LANES = {
    Lane.TRANSFER: "moving, storing",
    Lane.STORAGE: "moving, storing",
    Lane.WAIT: "waiting",
    Lane.CONTROL: "control",
}
COLUMNS = (*dict.fromkeys(_NODES.values()), "other nodes", *dict.fromkeys(_LANES.values()))
_WARM_UP = 2  # steps


@dataclass(frozen=True)
class Size:
    shape: Mapping[str, int]
    prompts: int
    tokens: int
    """Tokens of a response."""


SIZES = {
    "0.3M": Size(
        {"hidden": 96, "layers": 3, "heads": 3, "kv_heads": 1, "head_dim": 32, "intermediate": 256},
        32,
        12,
    ),
    "32M": Size(
        {
            "hidden": 512,
            "layers": 10,
            "heads": 8,
            "kv_heads": 4,
            "head_dim": 64,
            "intermediate": 1536,
        },
        4,
        16,
    ),
    "150M": Size(
        {
            "hidden": 1024,
            "layers": 12,
            "heads": 16,
            "kv_heads": 8,
            "head_dim": 64,
            "intermediate": 3072,
        },
        4,
        16,
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
    """Share of a part's seconds outside of torch's operators."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--engine", nargs="+", choices=("transformers", "vllm"), default=["transformers", "vllm"]
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="after two that warm up; half of them are profiled"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    cases = []
    for size, engine in product(given.sizes, given.engine):
        with TemporaryDirectory() as folder:
            cases.append(measure(Path(folder), size, engine, given.steps))
            print(line_of(cases[-1]), flush=True)
    text = report(cases, given.steps)
    print(text)
    if given.out:
        _, rule, sections = (given.out.read_text() if given.out.exists() else "").partition("\n## ")
        given.out.write_text(f"{text}{rule}{sections}")


def measure(folder: Path, name: str, engine: str, steps: int) -> Case:
    config, parameters = prepared(folder, name, engine, steps + _WARM_UP)
    run(config, profiled_grpo(config))
    url = config.run.url
    spans = [
        span
        for span in read_trace(url).spans
        if span.step > _WARM_UP and not is_profiled(span.step)
    ]
    found = find_bottleneck(spans)
    parts = [parts_of(worker, found.steps) for worker in found.workers]
    means = {part: mean(one[part] for one in parts) for part in COLUMNS}
    return Case(name, parameters, engine, means, python_shares(read_metrics(url)[_WARM_UP:]))


def prepared(
    folder: Path, name: str, engine: str, steps: int, **more: object
) -> tuple[Config, int]:
    """Make a model of this size and its data. Returns the config of a run, with ``more`` values of
    the keys of ``cluster``, and the parameters.
    """
    size = SIZES[name]
    model, parameters = endless_model(folder / "random", **size.shape)
    values = {
        "run.steps": steps,
        "data.url": make_prompts(folder / "data.parquet", size.prompts * steps),
        "data.batch_size": size.prompts,
        "model.path": model,
        "rollout.engine": engine,
        "rollout.n": _SAMPLES,
        "rollout.max_response_length": size.tokens,
    }
    values |= {f"cluster.{key}": value for key, value in more.items()}
    return load(shipped("quickstart.yaml"), two_workers(f"{folder}/run", values)), parameters


def make_prompts(path: Path, rows: int) -> str:
    texts = [f"Sort: {' '.join(f'{row:05}')} =" for row in range(rows)]
    pq.write_table(pa.table({"prompt": texts, "answer": texts}), path, row_group_size=64)
    return str(path)


def parts_of(worker: WorkerTime, steps: int) -> dict[str, float]:
    """Return the seconds of each part in a step of one worker."""
    sums = dict.fromkeys(COLUMNS, 0)
    for node, time in worker.nodes.items():
        sums[_NODES.get(node, "other nodes")] += time
    for lane, part in _LANES.items():
        sums[part] += worker.lanes[lane]
    return {part: time / steps / 1e9 for part, time in sums.items()}


def python_shares(records: Sequence[Record]) -> dict[str, float]:
    shares = {}
    for node, part in _NODES.items():
        values = [
            value
            for one in records
            if (value := one["metrics"].get(f"{PYTHON}/{node}")) is not None
        ]
        if values:
            shares[part] = mean(values)
    return shares


def line_of(case: Case) -> str:
    cells = []
    for part in COLUMNS:
        share = case.python.get(part)
        python = "" if share is None else f", {share:.0%} Python"
        cells.append(f"{case.parts[part]:.3f} ({case.parts[part] / case.seconds:.0%}{python})")
    size = SIZES[case.size]
    rows = f"{size.prompts * _SAMPLES} x {size.tokens}"
    return (
        f"| {case.parameters / 1e6:.1f}M | {case.engine} | {rows} | {case.seconds:.2f} | "
        f"{' | '.join(cells)} |"
    )


def report(cases: Sequence[Case], steps: int) -> str:
    doc = (__doc__ or "").split("\n\n")
    return "\n".join(
        [
            "# Where a step's time goes",
            "",
            f"`python benchmarks/step_parts.py --steps {steps}` on {date.today():%d %B %Y}, "
            f"{platform.machine()}, "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end.",
            "",
            doc[2].strip(),
            "",
            f"| parameters | engine | rows x tokens | s a step | {' | '.join(COLUMNS)} |",
            f"|---|---|---|---:{'|---:' * len(COLUMNS)}|",
            *map(line_of, cases),
            "",
        ]
    )


if __name__ == "__main__":
    main()
