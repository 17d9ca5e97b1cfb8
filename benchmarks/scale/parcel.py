"""Measures what the scheduler sends to the workers at the start of a run: plans and settings, from
64 to 1,024 workers.

    python benchmarks/scale/parcel.py [--workers 64 256 1024] [--config quickstart.yaml] [--json]

The parcel is serialized as Dask serializes it. What a worker does with it, opening and planning, is
timed as well.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from siirl_dask.config.file import load, shipped
from siirl_dask.driver.phases import plan_phases, validation_of
from siirl_dask.recipes.grpo import grpo
from siirl_dask.worker.dag_worker import DAGWorker
from siirl_dask.worker.run_spec import RunSpec, deserialize_phases

_PER_HOST = 8


@dataclass(frozen=True)
class Parcel:
    """The parcel of one worker, and what it takes to open it."""

    workers: int
    kilobytes: float
    all_megabytes: float
    """Megabytes of all workers together."""
    seconds: float
    """Seconds until a worker has its plans."""


def measure(config_name: str, workers: int) -> Parcel:
    """Serialize the parcel of a run of GRPO on ``workers`` workers, 8 on a host, all roles on
    each.
    """
    config = load(shipped(config_name))
    config = replace(config, cluster=replace(config.cluster, workers=workers, placement={}))
    dag = grpo(config)
    names = [str(number) for number in range(workers)]
    members = {
        name: f"tcp://10.0.{int(name) // _PER_HOST}.7:{40_000 + 7 * int(name) % 9_973}"
        for name in names
    }
    phases = plan_phases(config, dag, validation_of(config, dag, None), names, assume_columns=True)
    parcel = pickle.dumps(DAGWorker(RunSpec.of(config, members, phases)))
    before = time.perf_counter()
    plugin = pickle.loads(parcel)
    deserialize_phases(plugin.spec.phases, list(plugin.spec.members))
    seconds = time.perf_counter() - before
    return Parcel(workers, len(parcel) / 1e3, len(parcel) * workers / 1e6, seconds)


def table(parcels: Sequence[Parcel]) -> Table:
    """Return the parcels as a table."""
    shown = Table("workers", "kB a worker", "MB in all", "s to open")
    for parcel in parcels:
        sizes = f"{parcel.kilobytes:.1f}", f"{parcel.all_megabytes:.1f}", f"{parcel.seconds:.2f}"
        shown.add_row(f"{parcel.workers:,}", *sizes)
    return shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each number of workers and print the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument(
        "--config", default="quickstart.yaml", help="a configuration that ships with the package"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per number of workers"
    )
    options = parser.parse_args(arguments)
    parcels = [measure(options.config, workers) for workers in options.workers]
    if options.json:
        for parcel in parcels:
            print(json.dumps(asdict(parcel)))
    else:
        Console().print(table(parcels))


if __name__ == "__main__":
    main()
