"""Memory and time of handing new weights from a trainer to engines, in parts and whole.

    python benchmarks/weights.py [--bucket 16MiB ...] [--layers 8] [--steps 6] [--engines 1] [--out FILE]

One worker trains and the others generate, each a process; a step is nothing but the hand-over of a random model. A run
of its own for each case. Memory is what a worker has beyond what it had once its roles were built: anonymous memory,
and on an engine's worker the shared memory that it reads the weights from.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, mkdtemp

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from safetensors.torch import load_file

from generation import endless_model
from siirl_dask.config import Config, ModelConfig, RolloutConfig
from siirl_dask.config.file import load, shipped
from siirl_dask.context import Context, Device, Rank
from siirl_dask.driver.run import run
from siirl_dask.nodes import load_weights, publish_weights
from siirl_dask.observe import read_metrics
from siirl_dask.planner import DAG, Node, Role, Rows, columns
from siirl_dask.rollout import RolloutEngine, build_engine
from siirl_dask.schema import PARAMETER, PARAMETER_DATA, PARAMETER_DTYPE, PARAMETER_SHAPE
from siirl_dask.training import build_trainer

_SIZES = {"hidden": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "intermediate": 3072}
_EVERY = 0.002  # seconds


@dataclass(frozen=True)
class Case:
    bucket: str
    """``whole``, or of ``rollout.weight_bucket``."""
    trainer: int
    engine: int
    """Peak of the extra memory on each one's worker, bytes."""
    seconds: list[float]
    """Seconds of each hand-over."""


@columns(reads=[PARAMETER, PARAMETER_DTYPE, PARAMETER_SHAPE, PARAMETER_DATA])
def load_whole(ctx: Context, table: pa.Table) -> pa.Table:
    """Load weights like ``load_weights``, without declaring that they may come in parts: so all
    come at once.
    """
    given: pa.Table = load_weights(ctx, table)
    return given


@columns()
def begin(ctx: Context, table: pa.Table) -> pa.Table:
    return table


class Watcher:
    """A role that looks at its worker's memory and writes the peak to a file when the run is
    over.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._over = threading.Event()
        self._peak = self._before = own_memory()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_EVERY):
            now = own_memory()
            self._peak = {name: max(size, now[name]) for name, size in self._peak.items()}

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._file.write_text(
            json.dumps({name: size - self._before[name] for name, size in self._peak.items()})
        )


def own_memory() -> dict[str, int]:
    """Bytes of this process: ``anonymous``; ``all``, with shared memory that it has touched."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, shared = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
    return {"anonymous": anonymous, "all": anonymous + shared}


def build_filled(
    device: Device, rank: Rank, *, model: ModelConfig, rollout: RolloutConfig
) -> RolloutEngine:
    """An engine whose weights are its own: those of a folder are pages of its files until they
    are written to.
    """
    engine = build_engine(device, rank, model=model, rollout=rollout)
    engine.load_weights(load_file(f"{model.path}/model.safetensors").items(), 0)
    return engine


def build_watcher(device: Device, rank: Rank, *, folder: str) -> Watcher:
    return Watcher(Path(folder, f"memory-{device.worker}.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bucket", nargs="+", default=["16MiB", "64MiB", "256MiB"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--engine", default="transformers")
    parser.add_argument("--engines", type=int, default=1, help="workers that generate")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        model, parameters = endless_model(Path(folder, "model"), **_SIZES, layers=given.layers)
        data = str(Path(folder, "data.parquet"))
        pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), data)
        buckets = ["whole", *given.bucket]
        cases = [measure(folder, model, data, bucket, given) for bucket in buckets]
    text = report(cases, parameters, given)
    Console(soft_wrap=True).print(text)
    if given.out:
        given.out.write_text(text)


def measure(folder: str, model: str, data: str, bucket: str, given: argparse.Namespace) -> Case:
    engines = list(range(1, 1 + given.engines))
    url = Path(mkdtemp(dir=folder), "run")
    overrides = [
        f"run.url={url}",
        f"run.steps={given.steps + 1}",
        "run.lookahead=1",
        f"data.url={data}",
        "data.prepare=null",
        "data.batch_size=1",
        "algorithm.minibatches=1",
        f"model.path={model}",
        f"cluster.workers={1 + given.engines}",
        f"cluster.placement={{policy: [0], rollout: {engines}}}",
        f"rollout.engine={given.engine}",
        *([] if bucket == "whole" else [f"rollout.weight_bucket={bucket}"]),
        "checkpoint.every=0",
        "validation.url=null",
        "validation.test_url=null",
        "observe.progress=false",
    ]
    config = load(shipped("quickstart.yaml"), overrides)
    run(config, hand_over(config, whole=bucket == "whole"))
    trainer, *others = (
        json.loads((url / f"memory-{worker}.json").read_text()) for worker in (0, *engines)
    )
    # the first step warms up
    seconds = [record["seconds"] for record in read_metrics(str(url))[1:]]
    return Case(bucket, trainer["anonymous"], max(other["all"] for other in others), seconds)


def hand_over(config: Config, *, whole: bool) -> DAG:
    model, trainer, rollout = config.model, config.trainer, config.rollout
    roles = (
        Role("policy", partial(build_trainer, model=model, trainer=trainer, rollout=rollout)),
        Role("rollout", partial(build_filled, model=model, rollout=rollout)),
        Role(
            "watcher", partial(build_watcher, folder=config.run.url)
        ),  # the last, so that the others are built
    )
    reader = load_whole if whole else load_weights
    return DAG(
        roles,
        (
            Node(
                "begin", begin, role="rollout"
            ),  # so that a step's weights wait until those before are loaded
            Node("weights", publish_weights, role="policy", after="begin"),
            Node("load_weights", reader, role="rollout", after="weights", rows=Rows.REPLICATED),
        ),
    )


def report(cases: Sequence[Case], parameters: int, given: argparse.Namespace) -> str:
    lines = [
        f"{parameters:,} parameters in float32, {4 * parameters / 1e6:.0f} MB; {given.engines} x "
        f"{given.engine}; {given.steps} hand-overs; {platform.machine()}, {os.cpu_count()} cores, "
        f"{os.getloadavg()[0]:.0f} processes that want one",
        "",
        "| bucket | trainer's worker, MB more | an engine's worker, MB more | seconds, median | "
        "least |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {case.bucket} | {case.trainer / 1e6:.0f} | {case.engine / 1e6:.0f} | "
        f"{median(case.seconds):.2f} | {min(case.seconds):.2f} |"
        for case in cases
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
