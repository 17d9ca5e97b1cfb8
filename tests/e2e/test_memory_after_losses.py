"""A worker that others are lost beside has the memory, the files and the threads that it had.

With ``-s`` it prints them, for docs/benchmarks/faults.md.
"""

import os
import re
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from siirl_dask.nodes import score
from tests.clusters import local_cluster
from tests.e2e.test_elastic import Gates, begin, seen, with_notes  # noqa: F401

LOSSES, FIRST, BETWEEN = 3, 12, 8
"""Workers that are lost, the step in which the first one is, and the steps between two."""


def footprint():
    """Anonymous and shared memory of this process in MB, its open files and threads."""
    status = Path("/proc/self/status").read_text()
    sizes = [
        int(re.search(rf"{name}:\s*(\d+)", status)[1]) / 1024 for name in ("RssAnon", "RssShmem")
    ]
    return [*sizes, len(os.listdir("/proc/self/fd")), threading.active_count()]  # noqa: PTH208


def score_and_note(ctx, table, *, seen, **options):  # noqa: F811
    with Path(seen, f"memory-{os.getpid()}").open("a") as file:
        file.write(" ".join(map(str, [ctx.step, *footprint()])) + "\n")
    return score(ctx, table, **options)


score_and_note.__contract__ = replace(score.__contract__, depends_on_options=None)


def noting(dag, seen):  # noqa: F811
    dag = with_notes(dag, seen)
    return dag.replace(
        "reward", fn=partial(score_and_note, seen=seen, **dag.node("reward").options)
    )


@pytest.mark.sweep
def test_memory_after_lost_workers_is_what_it_was_before(begin, seen):  # noqa: F811
    gates, steps = Gates(seen), FIRST + LOSSES * BETWEEN
    with local_cluster(2) as cluster:
        stayed = cluster.workers[0].pid
        for number in range(LOSSES):
            gates.at(
                FIRST + number * BETWEEN, lambda: os.kill(cluster.workers[1].pid, signal.SIGKILL)
            )
        settings = [f"run.steps={steps}", "cluster.workers=2", "checkpoint.every=4"]
        run = begin("run", cluster.scheduler_address, *settings, change=noting)
        gates.check()
    assert len(run.summary.restarts) == LOSSES
    lines = [
        [float(part) for part in line.split()]
        for line in (seen / f"memory-{stayed}").read_text().splitlines()
    ]
    before = [line for line in lines if FIRST - 4 <= line[0] < FIRST]
    after = [line for line in lines if line[0] > steps - 4]
    for name, column in {"anonymous MB": 1, "shared MB": 2, "files": 3, "threads": 4}.items():
        was, now = (max(line[column] for line in part) for part in (before, after))
        print(f"| {name} | {was:.1f} | {now:.1f} |")
    was, now = (max(line[1] for line in part) for part in (before, after))
    assert now <= was + 8, "anonymous memory grows with each lost worker"
    was, now = (max(line[2] for line in part) for part in (before, after))
    assert now <= was + 1, "shared memory grows"
    assert max(line[3] for line in after) <= max(line[3] for line in before) + 4, "files stay open"
    assert max(line[4] for line in after) <= max(line[4] for line in before) + 2, "threads stay"
