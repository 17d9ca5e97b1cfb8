"""A model of a training step from measured parts: fitted, held against whole runs, and asked about 1,024 devices.

    python benchmarks/scale_model.py                        # all of it, into docs/benchmarks: half an hour
    python benchmarks/scale_model.py --stages paper         # the paper's figures anew; what was measured stays

Parts and runs are measured in a lab of hosts (``siirl_dask.testing.hosts``), which needs Linux and namespaces. Numbers
go to ``benchmarks/results/scale_model.json``, and each stage replaces its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import date
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the lab's processes import the package by the same name

os.environ.setdefault("OMP_NUM_THREADS", "1")  # here and in the lab: read when numpy is imported

from benchmarks.scale import parts, validate  # noqa: E402
from benchmarks.scale.page import BY_HAND, draw, page  # noqa: E402
from benchmarks.scale.paper import figures  # noqa: E402
from exchange import measure as measure_exchange  # noqa: E402

STAGES = ("parts", "runs", "paper")
# an exchange: rows of a worker, seconds a message, bytes/s
_ROWS, _LATENCY, _BANDWIDTH, _TRIES = (64, 1e-3, 1e9, 5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", nargs="*", choices=STAGES, default=list(STAGES), help="none: the page alone"
    )
    parser.add_argument(
        "--links",
        nargs="+",
        choices=[*parts.HELD_OUT],
        default=[*parts.HELD_OUT],
        help="of the runs",
    )
    parser.add_argument(
        "--more", action="store_true", help="keep the runs that are there, and add to them"
    )
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results" / "scale_model.json"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks" / "scale_model.md")
    given = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(given.results.read_text()) if given.results.exists() else {}
    )
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {text}", flush=True)

    def keep(stage: str, found: dict[str, Any]) -> None:
        results[stage] = found | {"load": os.getloadavg()[0], "date": f"{date.today():%d %B %Y}"}
        rounded = json.loads(
            json.dumps(results), parse_float=lambda number: float(f"{float(number):.4g}")
        )
        given.results.write_text(json.dumps(rounded, indent=1) + "\n")

    with TemporaryDirectory() as name:
        folder = Path(name)
        if "parts" in given.stages:
            keep("parts", parts.measure(folder, say))
        if "runs" in given.stages:
            parts.prepare(folder)
            for link in given.links:
                earlier = results.get("runs", {}).get("found", []) if given.more else []
                keep("runs", {"found": [*earlier, *validate.measure(folder, [link], say)]})
                given.more = True  # the first link's runs are there
    if "paper" in given.stages:
        keep("paper", figures(exchange_seconds))
    machine = parts.fit(results["parts"])
    links = parts.model_links(results["parts"])
    compared = validate.compare(machine, links, results["runs"]["found"])
    by_hand = given.out.read_text().partition(BY_HAND)[1:] if given.out.exists() else ()
    text = (
        "\n\n".join(filter(None, (page(results, machine, compared), "".join(by_hand)))).rstrip()
        + "\n"
    )
    given.out.write_text(text)
    draw(results["paper"], given.out.with_suffix(".png"))
    print(text)


@cache
def exchange_seconds(workers: int) -> float:
    """Return the seconds of an exchange of row statistics: its code is run, the network is
    modelled.

    The least of several, since other work on the machine only adds.
    """
    return min(
        measure_exchange(workers, _ROWS).modelled(_LATENCY, _BANDWIDTH) for _ in range(_TRIES)
    )


if __name__ == "__main__":
    main()
