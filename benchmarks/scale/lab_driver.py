"""A program: the driver of a run in the lab. ``python -m benchmarks.scale.lab_driver training KEY=VALUE ...``"""

from __future__ import annotations

import sys

from siirl_dask.config.file import load, shipped
from siirl_dask.driver.run import run

from .workload import hand_over, training


def main() -> None:
    config = load(shipped("quickstart.yaml"), sys.argv[2:])
    run(config, {"training": training, "hand_over": hand_over}[sys.argv[1]](config))


if __name__ == "__main__":
    main()
