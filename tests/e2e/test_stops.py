"""A run that is ended from outside, by a killed worker, Ctrl-C or SIGTERM, ends cleanly and says
so.
"""

import json
import os
import signal

import pyarrow.parquet as pq
import pytest

from siirl_dask.runs.checkpoints import committed
from tests.clusters import local_cluster

ENDLESS = "run.steps=100000"
ONCE = "run.max_restarts=0"


@pytest.mark.alone
def test_a_killed_worker_ends_the_run_and_loses_no_committed_rollout(start):
    run = start(ENDLESS, ONCE)
    run.wait_for_steps(2)
    os.kill(run.workers()[1].pid, signal.SIGKILL)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 15 * run.slowdown
    assert run.process.returncode == 1
    assert "left the cluster during train step" in err
    assert "error: worker '" in err
    summary = json.loads((run.url / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert summary["steps"] >= 2
    for step in range(1, summary["steps"] + 1):
        assert pq.read_table(run.url / "rollouts" / f"step={step:06d}").num_rows == 32


@pytest.mark.slow
def test_a_frozen_worker_ends_the_run_by_name_wherever_others_wait(start):
    run = start(ENDLESS, ONCE)
    run.wait_for_steps(2)
    os.kill(run.workers()[1].pid, signal.SIGSTOP)
    seconds, _, err = run.end(timeout=60)
    assert seconds < 20 * run.slowdown  # five to notice, and then the cluster is closed
    assert run.process.returncode == 1
    assert "no sign of life within 5 s" in err
    assert "train step" in err
    assert json.loads((run.url / "summary.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.alone),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_and_sigterm_stop_soon_and_say_how_far_it_came(start, sign):
    """Ctrl-C at once, SIGTERM with a last checkpoint."""
    run = start(ENDLESS)
    run.wait_for_steps(2)
    if sign == signal.SIGINT:
        os.killpg(run.process.pid, sign)  # as the terminal does: to every process of the group
    else:
        run.process.send_signal(sign)
    seconds, _, err = run.end(timeout=60)
    assert seconds < (5 if sign == signal.SIGINT else 15) * run.slowdown
    assert run.process.returncode == 130
    summary = json.loads((run.url / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert f"stopped by the user after {summary['steps']} of 100,000 steps" in err
    assert committed(str(run.url)) == ([] if sign == signal.SIGINT else [summary["steps"]])
    assert "Traceback" not in err
    assert "refused a request" not in err, "a peer that had stopped before was no stranger"


@pytest.mark.slow
@pytest.mark.parametrize(
    "sign", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.sweep)]
)
def test_a_run_whose_reward_never_returns_stops_with_a_message(start, tmp_path, monkeypatch, sign):
    entered = tmp_path / "entered"
    monkeypatch.setenv("NEVER_RETURNS", str(entered))
    run = start("rewards.function=tests.e2e.rewards:never_returns", "run.grace=1")
    run.wait_until(entered.exists)
    os.killpg(run.process.pid, sign) if sign == signal.SIGINT else run.process.send_signal(sign)
    _, out, err = run.end(timeout=120)
    assert (run.process.returncode, out) == (130, "")
    assert "Traceback" not in err
    lines = err.splitlines()
    assert "error: stopped by the user after 0 of 3 steps; what was written is whole" in lines
    assert lines[-1].startswith("  resume   siirl-dask run ")
    assert json.loads((run.url / "summary.json").read_text())["status"] == "interrupted"


@pytest.mark.slow
def test_a_stopped_run_on_an_existing_cluster_names_its_busy_workers(start, tmp_path):
    entered = tmp_path / "entered"
    with local_cluster(1, env={"NEVER_RETURNS": str(entered)}) as cluster:
        run = start(
            "rewards.function=tests.e2e.rewards:never_returns",
            f"cluster.address={cluster.scheduler_address}",
            "cluster.workers=1",
            "cluster.placement={}",
            "run.grace=1",
        )
        run.wait_until(entered.exists)
        run.process.send_signal(signal.SIGTERM)
        _, out, err = run.end(timeout=120)
        os.kill(cluster.workers[0].pid, signal.SIGKILL)  # its cluster would wait for the reward
    assert (run.process.returncode, out) == (130, "")
    lines = err.splitlines()
    place = lines.index("error: stopped by the user after 0 of 3 steps; what was written is whole")
    busy = [line for line in lines if "worker '0'" in line]
    assert any("node 'reward', train step 1" in line for line in busy), lines
    assert lines[place + 1 :], "what resumes it"
