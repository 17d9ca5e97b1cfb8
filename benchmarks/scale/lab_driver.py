"""A program: the driver of the lab's runs, one after the other, so that Python's imports are paid
once.

Each line of standard input is a run, ``["training", "KEY=VALUE", ...]`` as JSON; a line ``done``
follows each.
"""

from __future__ import annotations

import json
import sys

from siirl_dask.config.file import load, shipped
from siirl_dask.driver.run import run

from .workload import hand_over, training


def main() -> None:
    for line in sys.stdin:
        kind, *overrides = json.loads(line)
        config = load(shipped("quickstart.yaml"), overrides)
        run(config, {"training": training, "hand_over": hand_over}[kind](config))
        print("done", flush=True)


if __name__ == "__main__":
    main()
