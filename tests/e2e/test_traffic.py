"""No sample passes through the scheduler or the client."""

from functools import partial
from statistics import fmean

import pytest

from siirl_dask.planner import DAG, Node, Role, Rows
from siirl_dask.testing.rows import build_nothing, fill, take

HEARTBEATS = 50_000
"""Bytes a second that four workers and the driver send at most to say that they are there."""
FOUR = (
    "cluster.workers=4",
    "cluster.placement={rollout: [0, 1], policy: [2, 3]}",
    "data.batch_size=64",
)


def moving(tokens):
    def dag(config):
        roles = (Role("rollout", build_nothing), Role("policy", build_nothing))
        there = Node("there", partial(fill, tokens=tokens), role="rollout")
        back = Node("back", take, role="policy", after="there", rows=Rows.BALANCED)
        return DAG(
            roles,
            (there, back, Node("again", take, role="rollout", after="back", rows=Rows.GROUPED)),
        )

    return dag


def test_scheduler_and_client_carry_no_more_when_rows_are_100_times_longer(train):
    short = train("short", *FOUR, "run.steps=30", dag=moving(100))
    long = train("long", *FOUR, "run.steps=30", dag=moving(10_000))
    assert long.summary.bytes_per_step.peers > 80 * short.summary.bytes_per_step.peers
    assert long.summary.bytes_per_step.peers > 64 * 10_000 * 4
    control = [run.summary.bytes_per_step.scheduler_and_client for run in (short, long)]
    beats = [HEARTBEATS * fmean(r["seconds"] for r in run.records()) for run in (short, long)]
    assert control[1] < 1.3 * control[0] + max(0.0, beats[1] - beats[0])
    assert control[1] < 100_000 + beats[1]  # four workers: tasks, done events


def test_every_row_arrives_with_its_own_values(train):
    run = train("rows", *FOUR, "run.steps=3", dag=moving(50))
    for record in run.records():
        expected = sum(row + 1000 * record["step"] + i for row in range(64) for i in range(50))
        assert record["metrics"]["taken/sum"] == pytest.approx(2 * expected)
