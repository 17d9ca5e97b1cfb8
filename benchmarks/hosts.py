"""Measures how many tokens leave their host when rows are balanced, with and without regard to hosts.

    python benchmarks/hosts.py [--workers 1024] [--per-host 8] [--rows 64] [--out docs/benchmarks/hosts.md]

Rows of log-normal lengths lie where they were made; ``assign_owners`` gives each an owner, as it does in a run.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from siirl_dask.coordinator.layout.assignment import EdgeStatistics, assign_owners
from siirl_dask.planner import Edge, Rows
from siirl_dask.schema import make_schema

POLICIES = {
    "balanced": (Rows.BALANCED, False),
    "by mini-batch": (Rows.BALANCED, True),
    "grouped": (Rows.GROUPED, False),
}
ROUNDS = 3


def placements(workers: int, per_host: int) -> dict[str, tuple[list[int], list[int]]]:
    """Return the workers that have rows and those that want them: the same ones, or each half of
    every host.
    """
    everyone, half = list(range(workers)), per_host // 2
    first = [worker for worker in everyone if worker % per_host < half]
    return {
        "both roles on every worker": (everyone, everyone),
        "a role on each half of every host": (
            first,
            [worker for worker in everyone if worker % per_host >= half],
        ),
    }


def make_rows(count: int, sources: int) -> EdgeStatistics:
    """Return rows in groups of 16 and four mini-batches, equally many on each source."""
    random, ids = np.random.default_rng(0), np.arange(count)
    tokens = np.minimum(random.lognormal(7, 1, count), 16_000).astype(np.int64)
    return EdgeStatistics(
        ids, ids // 16, tokens, random.integers(0, 4, count), ids * sources // count, ids
    )


def measure(
    edge: Edge, rows: EdgeStatistics, hosts: Mapping[str, str], *, regard: bool
) -> tuple[float, float, float]:
    """Return the share of tokens that leave their host, the fullest over the mean, and seconds
    of CPU.
    """
    seconds = []
    for _ in range(ROUNDS):
        start = time.process_time()
        owner = assign_owners(edge, rows, hosts=hosts if regard else None)
        seconds.append(time.process_time() - start)
    sources, targets = (
        np.array([hosts[worker] for worker in workers]) for workers in (edge.sources, edge.targets)
    )
    leaving = rows.tokens[sources[rows.sources] != targets[owner]].sum() / rows.tokens.sum()
    loads = np.bincount(owner, weights=rows.tokens, minlength=len(edge.targets))
    return float(leaving), float(loads.max() / loads.mean()), sorted(seconds)[ROUNDS // 2]


def lines(workers: int, per_host: int, each: int) -> Iterator[str]:
    names = [f"w{number}" for number in range(workers)]
    hosts = {name: f"h{number // per_host}" for number, name in enumerate(names)}
    for placement, (sources, targets) in placements(workers, per_host).items():
        rows = make_rows(each * workers, len(sources))
        ends = tuple(tuple(names[number] for number in numbers) for numbers in (sources, targets))
        for policy, (layout, by_minibatch) in POLICIES.items():
            edge = Edge("a", "b", *ends, layout, by_minibatch, make_schema({}), "a")
            cells = [measure(edge, rows, hosts, regard=regard) for regard in (False, True)]
            texts = [
                f"{leaving:.1%} | {fullest:.3f} | {1000 * cpu:.0f} ms"
                for leaving, fullest, cpu in cells
            ]
            yield f"| {placement} | {policy} | {' | '.join(texts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1024)
    parser.add_argument("--per-host", type=int, default=8)
    parser.add_argument("--rows", type=int, default=64, help="per worker")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    header = ["placement", "rows", *("tokens leaving their host", "fullest / mean", "deciding") * 2]
    text = (
        "# Rows that leave their host\n\n"
        f"{given.rows} rows of log-normal lengths on each of {given.workers:,} workers, "
        f"{given.per_host} a host, in "
        "groups of 16. The first three figures are without regard to hosts, the last three with "
        "it: within 1.02 "
        f"of the mean. Deciding is one worker's CPU, median of {ROUNDS} (Python "
        f"{platform.python_version()}, "
        f"{platform.machine()}).\n\n| {' | '.join(header)} |\n|{' --- |' * len(header)}\n"
    )
    text += "\n".join(lines(given.workers, given.per_host, given.rows))
    text += (
        f"\n\nRepeat it: `python benchmarks/hosts.py --workers {given.workers} --rows "
        f"{given.rows}`.\n"
    )
    print(text) if given.out is None else given.out.write_text(text)


if __name__ == "__main__":
    main()
