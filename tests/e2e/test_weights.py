"""New weights in parts, on a cluster of processes: the same run as with whole tables, and how it ends in the middle."""

import os
import signal
from dataclasses import replace

import pytest

from siirl_dask.errors import RunError
from siirl_dask.nodes import load_weights
from siirl_dask.planner import DAG, columns
from tests.clusters import local_cluster
from tests.e2e.test_invariance import EXACT

READS = ["parameter", "dtype", "shape", "data"]
SMALL = "rollout.weights_bucket=20KiB"  # of 365 kB; the largest parameter has 68 kB
OVER = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [1, 2, 3]}"


@columns(reads=READS)
def load_whole(ctx, table):
    return load_weights(ctx, table)


def die_after_some(ctx, parts):
    """As a crash does, when a few parts have come."""
    for number, _ in enumerate(parts.tables):
        if number == 3 and ctx.rank.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@columns(reads=READS, takes_parts=die_after_some)
def load_and_die(ctx, table):
    raise NotImplementedError


def loading_with(fn):
    def change(dag: DAG) -> DAG:
        return DAG(dag.roles, tuple(replace(n, fn=fn) if n.name == "load_weights" else n for n in dag.nodes))

    return change


def test_a_run_is_the_same_whether_weights_come_whole_or_in_parts_apart_overlapping_or_together(train):
    whole = train("whole", "run.steps=2", change=loading_with(load_whole))
    others = [
        train("apart", "run.steps=2", SMALL),
        train("shards", "run.steps=2", SMALL, OVER, "trainer.backend=fsdp"),
        train("together", "run.steps=2", SMALL, "cluster.placement={}", "trainer.backend=fsdp"),
    ]
    for run in others:
        for step in (1, 2):
            assert run.table("rollouts", step).select(EXACT).equals(whole.table("rollouts", step).select(EXACT)), step
        for expected, got in zip(whole.records(), run.records(), strict=True):
            assert got["metrics"]["policy/loss"] == pytest.approx(expected["metrics"]["policy/loss"], abs=1e-5)
            assert got["metrics"]["seconds/weights->load_weights"] > 0
    parts, rows = (run.records()[-1]["metrics"]["bytes/peers"] for run in (others[0], whole))
    assert parts == pytest.approx(rows, rel=0.05)


def test_a_worker_that_dies_while_weights_come_ends_the_run(train):
    with local_cluster(4) as cluster:
        address = f"cluster.address={cluster.scheduler_address}"
        with pytest.raises(RunError, match=r"worker '0'.* left the cluster during train step 1"):
            train("dies", SMALL, address, change=loading_with(load_and_die))
