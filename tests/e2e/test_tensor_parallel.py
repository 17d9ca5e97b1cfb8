"""Runs whose two workers are one vLLM engine: the rows of one worker, and an end by name when
one is killed.
"""

import os
import re
import signal
from importlib.util import find_spec

import pyarrow.parquet as pq
import pytest

from tests.e2e.test_in_flight import GIVEN, ROWS, STEPS, check_ages, check_parts
from tests.e2e.test_invariance import EXACT
from tests.e2e.test_replay import cut_short
from tests.e2e.test_resume import weights
from tests.e2e.test_turns import PER_RUN, TURNS, of
from tests.memory_files import left_since, unused_files

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")

ON_TWO = [
    "rollout.engine=vllm",
    "rollout.tensor_parallel_size=2",
    "rollout.vllm.kv_cache_memory=64MiB",
    "cluster.workers=2",
    "cluster.placement={}",
    "cluster.peer_timeout=30",
    "run.steps=100000",
    "run.max_restarts=0",
]


def rows_of(url, step):
    return pq.read_table(url / "rollouts" / f"step={step:06d}").sort_by("row_id")


def kill_a_worker(run, after):
    """Kill one of the two workers once ``after`` steps are done. The run must end of it, and leave
    nothing of what its processes had mapped.
    """
    run.wait_until(
        lambda: run.steps() >= after, timeout=240
    )  # two engines start beside other tests
    os.kill(run.workers()[1].pid, signal.SIGKILL)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 30 * run.slowdown
    assert run.process.returncode == 1
    assert "left the cluster during train step" in err


@pytest.mark.alone
def test_two_workers_sample_like_one_and_a_killed_one_ends_the_run(start, train):
    before = unused_files()
    run = start(*ON_TWO)
    kill_a_worker(run, 3)
    assert not left_since(before)
    one = train("one", "cluster.workers=1", "cluster.placement={}")
    for step in (1, 2, 3):
        expected, got = (rows_of(url, step) for url in (one.url, run.url))
        assert got.select(EXACT).equals(expected.select(EXACT)), step
        assert set(got["worker"].to_pylist()) == {"0", "1"}
        for row in got.to_pylist():
            assert row["rollout_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-4)


@pytest.mark.slow
def test_episodes_of_two_workers_are_those_of_one_and_a_killed_one_ends_the_run(start, train):
    """Environments answer whenever they like, and each worker has episodes of its own."""
    few = ("rollout.max_rows=5", "environments.max_open=9")
    run = start(*of("Delayed"), *ON_TWO, *few, config=TURNS)
    kill_a_worker(run, 2)
    one = train("one", *of("Delayed"), "cluster.workers=1", "run.steps=2", config_file=TURNS)
    for step in (1, 2):
        expected, got = (rows_of(url, step) for url in (one.url, run.url))
        exact = [name for name in expected.column_names if name not in PER_RUN]
        assert got.select(exact).equals(expected.select(exact)), step
        for row in got.to_pylist():
            own = [at for at, mine in enumerate(row["response_mask"]) if mine]
            assert [row["rollout_logprobs"][at] for at in own] == pytest.approx(
                [row["old_logprobs"][at] for at in own], abs=1e-4
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "code", "said"),
    [
        ("memory", 2, "vLLM cannot run it with .*memory"),
        ("killed", 1, "worker '1' .* left the cluster during the start"),
    ],
)
def test_an_engine_that_cannot_start_on_one_worker_ends_the_run_with_the_reason_there(
    start, fails, code, said
):
    """The other worker is not waited for until its collective gives up."""
    run = start(
        "rollout.engine=tests.e2e.recording_engine:FAILING",
        f"rollout.engine_options={{fails: {fails}}}",
        "rollout.tensor_parallel_size=2",
        "cluster.workers=2",
        "cluster.placement={}",
        "run.max_restarts=0",
    )
    _, _, err = run.end(timeout=240)
    assert run.process.returncode == code, err
    assert re.search(said, err), err
    assert "Connection closed by peer" not in err


@pytest.mark.slow
def test_two_workers_take_new_weights_together_and_a_resumed_run_repeats_the_steps(
    digits_task, train, tmp_path
):
    """Each part of a row is what its version samples; stored steps lead to the same weights."""
    versions = tmp_path / "versions"
    versions.mkdir()
    given = (
        *GIVEN,
        *ROWS,
        "rollout.engine=tests.e2e.recording_engine:VLLM",
        f"rollout.engine_options={{folder: {versions}, seconds: 0.02}}",
        "rollout.tensor_parallel_size=2",
        "cluster.workers=3",
        "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2]}",
    )
    run = train("run", *given)
    tables = [run.table("rollouts", step) for step in range(1, STEPS + 1)]
    rows = [row for step in check_ages(run) for row in step]
    assert {row["worker"] for row in rows} == {"0", "1"}
    check_parts(digits_task.model, rows, versions)
    straight = weights(run)
    cut_short(run, logged=4)
    resumed = train("run", *given)
    for step, table in enumerate(tables, 1):
        assert resumed.table("rollouts", step).equals(table), step
    assert all(tensor.equal(weights(resumed)[name]) for name, tensor in straight.items())
