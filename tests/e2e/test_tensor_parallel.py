"""Runs whose two workers are one vLLM engine: the rows of one worker, and an end by name when
one is killed.
"""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.test_invariance import EXACT
from tests.e2e.test_turns import PER_RUN, TURNS, of

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHARED_MEMORY = Path("/dev/shm")
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


def left_in_memory():
    """But for semaphores, which Python's own helper takes away, some time after."""
    return {file.name for file in SHARED_MEMORY.glob("*") if not file.name.startswith("sem.")}


def rows_of(url, step):
    return pq.read_table(url / "rollouts" / f"step={step:06d}").sort_by("row_id")


def kill_a_worker(run, after, before):
    """Kill one of the two workers once ``after`` steps are done. The run must end of it, and leave
    no more in shared memory than there was ``before``.
    """
    run.wait_for_steps(after)
    os.kill(run.workers()[1].pid, signal.SIGKILL)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 30 * run.slowdown
    assert run.process.returncode == 1
    assert "left the cluster during train step" in err
    assert left_in_memory() <= before


def test_two_workers_sample_like_one_and_a_killed_one_ends_the_run(start, train):
    before = left_in_memory()
    run = start(*ON_TWO)
    kill_a_worker(run, 3, before)
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
    before = left_in_memory()
    run = start(*of("Delayed"), *ON_TWO, *few, config=TURNS)
    kill_a_worker(run, 2, before)
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
