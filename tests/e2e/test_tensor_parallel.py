"""A run whose two workers are one vLLM engine: the rows of one worker, and an end by name when
one is killed.
"""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.test_invariance import EXACT

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHARED_MEMORY = Path("/dev/shm")


def left_in_memory():
    """But for semaphores, which Python's own helper takes away, some time after."""
    return {file.name for file in SHARED_MEMORY.glob("*") if not file.name.startswith("sem.")}


def test_two_workers_sample_like_one_and_a_killed_one_ends_the_run(start, train):
    before = left_in_memory()
    shared = [
        "rollout.engine=vllm",
        "rollout.tensor_parallel_size=2",
        "rollout.vllm.kv_cache_memory=64MiB",
    ]
    run = start(
        "run.steps=100000",
        "cluster.workers=2",
        "cluster.placement={}",
        "cluster.peer_timeout=30",
        *shared,
        "run.max_restarts=0",
    )
    run.wait_for_steps(3)
    os.kill(run.workers()[1].pid, signal.SIGKILL)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 30 * run.slowdown
    assert run.process.returncode == 1
    assert "left the cluster during train step" in err
    assert left_in_memory() <= before
    one = train("one", "cluster.workers=1", "cluster.placement={}")
    for step in (1, 2, 3):
        expected, got = (
            pq.read_table(url / "rollouts" / f"step={step:06d}").sort_by("row_id")
            for url in (one.url, run.url)
        )
        assert got.select(EXACT).equals(expected.select(EXACT)), step
        assert set(got["worker"].to_pylist()) == {"0", "1"}
        for row in got.to_pylist():
            assert row["rollout_logprobs"] == pytest.approx(row["old_logprobs"], abs=1e-4)
