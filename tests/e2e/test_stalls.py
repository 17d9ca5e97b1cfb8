"""A stall is silence: a step may take any time while something gets done, and what hangs is
named by its place.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

TWO = ["cluster.workers=2", "cluster.placement={}"]


@pytest.mark.slow
def test_a_step_may_take_longer_than_the_stall_timeout_while_rows_are_scored(train):
    """Sixteen rows of a quarter of a second on each worker: one waits for the other for as long
    where they differ.
    """
    slow = [
        "rewards.function=tests.e2e.rewards:is_slow",
        "cluster.stall_timeout=3",
        "run.steps=1",
    ]
    began = time.monotonic()
    run = train("slow", *TWO, *slow)
    assert run.summary.steps == 1
    assert run.records()[0]["seconds"] > 3
    apart = ["cluster.workers=2", "cluster.placement={reward: [0], policy: [1], rollout: [1]}"]
    assert train("apart", *apart, *slow).records()[0]["seconds"] > 5
    assert time.monotonic() - began < 120


@pytest.mark.slow
def test_a_reward_that_holds_the_interpreters_lock_for_ten_seconds_ends_no_run(
    start, tmp_path, monkeypatch
):
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    held = "rewards.function=tests.e2e.rewards:holds_the_lock"
    run = start(held, *TWO, "run.steps=1", "run.max_restarts=0")
    seconds, _, err = run.end(timeout=120)
    assert run.process.returncode == 0, err
    assert seconds > 10
    assert (tmp_path / "held").exists()


@pytest.mark.alone
def test_a_reward_that_hangs_ends_the_run_by_the_name_of_its_node(start, tmp_path, monkeypatch):
    monkeypatch.setenv("NEVER_RETURNS", str(tmp_path / "entered"))
    run = start("rewards.function=tests.e2e.rewards:never_returns", *TWO, "cluster.stall_timeout=3")
    run.wait_until((tmp_path / "entered").exists)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 15 * run.slowdown
    assert (
        "error: train step 1: nothing got done within 3 s (cluster.stall_timeout): worker '" in err
    )
    assert "is in node 'reward', train step 1" in err
    assert "rewards.py:" in err, "the stack ends in the user's own line"
    assert "in never_returns: time.sleep(10**6)" in err
    assert json.loads((run.url / "summary.json").read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_node_that_hangs_on_one_worker_is_told_with_its_stack_and_those_who_wait_for_it(
    start, tmp_path, monkeypatch
):
    """Within its own time, though all others wait for it and the run as a whole might stand for
    ten minutes.
    """
    monkeypatch.setenv("NEVER_RETURNS", str(tmp_path / "entered"))
    apart = [
        "cluster.workers=3",
        "cluster.placement={reward: [0], rollout: [0], policy: [1, 2]}",
        "run.node_timeout=3",
    ]
    run = start("rewards.function=tests.e2e.rewards:never_returns", *apart)
    run.wait_until((tmp_path / "entered").exists)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 15 * run.slowdown
    lines = err.splitlines()
    cause = next(at for at, line in enumerate(lines) if line.startswith("error: "))
    assert re.match(
        r"error: node 'reward', train step 1: nothing got done for \d+ s \(run.node_timeout\) on "
        r"worker '0'",
        lines[cause],
    )
    assert "in never_returns: time.sleep(10**6)" in err
    assert re.search(
        r"worker '[12]' waits for worker '0' on edge train/reward->\w+ \(\w+\), for \d+ s", err
    )
    resume = lines[-1]
    assert resume.startswith("  resume   siirl-dask run ")
    assert "rewards.function=tests.e2e.rewards:never_returns" in resume
    assert "0 of 3 steps are done" in err
    failure = json.loads((run.url / "summary.json").read_text())["failure"]
    assert (failure["kind"], failure["worker"], failure["node"]) == ("RunError", "0", "reward")
    assert failure["resume"] == resume.split(maxsplit=1)[1]


@pytest.mark.slow
def test_a_stopped_worker_is_named_with_what_became_of_its_process_and_replaced(start):
    """Its peers would have waited for it for a minute."""
    run = start(
        "run.steps=100000", "cluster.peer_timeout=60", "run.node_timeout=3", "run.max_restarts=0"
    )
    run.wait_for_steps(2)
    stopped = run.workers()[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 20 * run.slowdown
    assert re.search(
        r"error: train step \d+: worker '\d' at \S+: no heartbeat for \d+ s \(run.node_timeout\): "
        r"its process was",
        err,
    )
    assert f"its process was stopped (SIGSTOP); kill -CONT {stopped.pid} wakes it" in err


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("pieces", "said"), [(4, None), (10**6, "is in the building of role 'slow'")]
)
def test_a_role_that_takes_long_to_build_may_as_long_as_it_says_so(
    digits_task, tmp_path, pieces, said
):
    """A builder that tells of its progress has no limit; one that stops to is named."""
    from tests.conftest import digits_overrides

    given = [
        *digits_overrides(digits_task, tmp_path / "run"),
        *TWO,
        "run.steps=1",
        "cluster.start_timeout=4",
    ]
    environment = {**os.environ, "PIECES": str(pieces)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.slow_start", "configs/quickstart.yaml", *given],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if said is None:
        assert done.returncode == 0, done.stderr
    else:
        assert done.returncode == 1
        assert (
            "the start: nothing got done within 4 s (cluster.start_timeout): worker '"
            in done.stderr
        )
        assert said in done.stderr
