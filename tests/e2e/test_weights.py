"""New weights in parts, on a cluster of processes: the same run as with whole tables, and how it
ends in the middle.
"""

import os
import re
import signal
from dataclasses import replace
from functools import partial

import pytest

from siirl_dask.context import RowStream
from siirl_dask.errors import RunError
from siirl_dask.nodes import load_weights
from siirl_dask.nodes.weights import weights_as_tensors
from siirl_dask.planner import DAG, WeightSink, WeightSource, columns
from siirl_dask.schema import fields
from tests.clusters import local_cluster
from tests.e2e.test_invariance import EXACT

READS = ["parameter", "dtype", "shape", "data"]
SMALL = "rollout.weight_bucket=20KiB"  # of 365 kB; the largest parameter has 68 kB
OWN = "rollout.work_stealing=false"  # the last bit of a log-prob depends on the rows beside it
OVER = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [1, 2, 3]}"


@columns(reads=READS)
def load_whole(ctx, table):
    return load_weights(ctx, table)


def die_after_some(ctx, stream):
    """End the process after a few tables, like a crash."""
    for number, _ in enumerate(stream.tables):
        if number == 3 and ctx.rank.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@columns(reads=READS, stream=WeightSink(die_after_some))
def load_and_die(ctx, table):
    raise NotImplementedError


def stop_after_some(ctx, table, *, sign):
    """When some buffers have gone and others are on their way."""
    stream = weights_as_tensors(ctx, table)

    def tensors():
        for number, tensor in enumerate(stream.tables):
            if number == 8:
                os.kill(os.getpid(), sign)
            yield tensor

    return RowStream(stream.index, tensors())


def in_parts(ctx, table, *, max_bytes, sign):
    raise NotImplementedError


@columns(
    writes=fields(*READS),
    new_rows=True,
    passes=False,
    stream=WeightSource(in_parts, stop_after_some),
)
def publish_and_stop(ctx, table, *, sign):
    raise NotImplementedError


def with_fn(name, fn):
    def change(dag: DAG) -> DAG:
        return DAG(
            dag.roles,
            tuple(replace(n, fn=fn, options={}) if n.name == name else n for n in dag.nodes),
        )

    return change


@pytest.mark.slow
def test_whole_and_partial_weights_give_the_same_run_in_any_placement(train):
    whole = train("whole", "run.steps=2", change=with_fn("load_weights", load_whole))
    others = [
        train("apart", "run.steps=2", SMALL, OWN),
        train("shards", "run.steps=2", SMALL, OVER, "trainer.backend=fsdp"),
        train("together", "run.steps=2", SMALL, "cluster.placement={}", "trainer.backend=fsdp"),
    ]
    same_to_the_last_bit(
        others[0], train("broadcast", "run.steps=2", SMALL, OWN, "rollout.weight_sync=broadcast")
    )
    for run in others:
        for step in (1, 2):
            assert (
                run.table("rollouts", step)
                .select(EXACT)
                .equals(whole.table("rollouts", step).select(EXACT))
            ), step
        for expected, got in zip(whole.records(), run.records(), strict=True):
            assert got["metrics"]["policy/loss"] == pytest.approx(
                expected["metrics"]["policy/loss"], abs=1e-5
            )
            assert got["metrics"].get("seconds/weights->load_weights", 0.0) > 0 or run is others[2]
    together, apart = (
        run.records()[-1]["metrics"]["bytes/peers"] for run in (others[2], others[0])
    )
    assert together < apart / 4  # no weights
    parts, rows = (run.records()[-1]["metrics"]["bytes/peers"] for run in (others[0], whole))
    assert parts == pytest.approx(rows, rel=0.05)


def same_to_the_last_bit(rows, broadcast):
    """Assert that both runs trained the same, and that the broadcast weights did not travel as
    rows.
    """
    for step in (1, 2):
        expected, got = (
            run.table("rollouts", step).select([*EXACT, "rollout_logprobs"])
            for run in (rows, broadcast)
        )
        assert got.equals(expected), step
    for expected, got in zip(rows.records(), broadcast.records(), strict=True):
        expected, got = expected["metrics"], got["metrics"]
        assert got["policy/loss"] == expected["policy/loss"]
        assert got["bytes/broadcast"] > 300_000
        assert expected["bytes/peers"] - got["bytes/peers"] > 1.9 * got["bytes/broadcast"]
        assert "bytes/broadcast" not in expected


def test_shards_that_go_by_broadcast_are_loaded_as_those_that_go_by_rows(train):
    fsdp = ("run.steps=2", SMALL, OWN, "trainer.backend=fsdp")
    same_to_the_last_bit(
        train("rows", *fsdp), train("broadcast", *fsdp, "rollout.weight_sync=broadcast")
    )


def load_the_trainers_own(ctx, parts):
    """Load as load_weights does, if the tensors are the memory of the trainer beside this
    engine.
    """
    live = dict(ctx.resources["policy"].weights())
    tensors = list(parts.tables)
    for name, tensor in zip(parts.index["parameter"].to_pylist(), tensors, strict=True):
        assert tensor.data_ptr() == live[name].data_ptr(), f"{name} is a copy"
    ctx.resource.load_weights(zip(live, tensors, strict=True), ctx.step)


@columns(reads=READS, stateful=True, stream=WeightSink(die_after_some, load_the_trainers_own))
def load_own(ctx, table):
    raise NotImplementedError


def test_an_engine_beside_its_trainer_gets_the_tensors_themselves(train):
    for workers in ("1", "2"):
        where = (f"cluster.workers={workers}", "cluster.placement={}", "run.steps=2")
        assert (
            train(f"own {workers}", *where, change=with_fn("load_weights", load_own)).summary.steps
            == 2
        )


def ends(train, *overrides, change):
    """Return the error of a run on an existing cluster that ``change`` ends while the first
    weights arrive.
    """
    one_each = ("cluster.workers=2", "cluster.placement={rollout: [0], reward: [0], policy: [1]}")
    with local_cluster(2) as cluster:
        settings = [
            f"cluster.address={cluster.scheduler_address}",
            "cluster.peer_timeout=2",
            "run.max_restarts=0",
            *one_each,
            *overrides,
        ]
        with pytest.raises(RunError) as raised:
            train("ends", SMALL, *settings, change=change)
    return str(raised.value)


def test_a_worker_that_dies_while_weights_come_ends_the_run(train):
    said = ends(train, change=with_fn("load_weights", load_and_die))
    assert re.search(r"worker '0'.* left the cluster during train step 1", said)


@pytest.mark.parametrize(
    ("sign", "expected"),
    [
        (signal.SIGKILL, "worker '1'.* left the cluster during train step 1"),
        pytest.param(
            signal.SIGSTOP,
            "train step 1: worker '1'.* no sign of life within 2 s",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_trainer_that_dies_or_stands_still_in_a_broadcast_ends_the_run(train, sign, expected):
    change = with_fn("weights", partial(publish_and_stop, sign=sign))
    said = ends(train, "rollout.weight_sync=broadcast", change=change)
    assert re.search(expected, said), said
