"""kill -9 of a whole run while it writes checkpoints: what is read afterwards is always a whole
one.
"""

import os
import random
import signal
import threading
import time

import pytest

from siirl_dask.runs.checkpoints import checkpoint_url, committed, read_state
from siirl_dask.training.files.checkpoint import read_model

# ten were survived by hand; each is a start of a process of its own, which CI has little time for
KILLS = 2
ONE = ["cluster.workers=1", "cluster.placement={}", "checkpoint.every=1"]
EXACT = ["row_id", "prompt", "response_ids", "reward", "weights_version", "advantage"]


def pause():
    """Long enough to leave the run a processor, short enough to hit any part of a checkpoint."""
    threading.Event().wait(0.002)


def kill_while_it_writes(run, chance, after):
    """At some moment of the few steps after step ``after``; every one of them ends in a
    checkpoint.
    """
    deadline = time.monotonic() + 90
    while not [step for step in committed(str(run.url)) if step > after]:
        assert run.process.poll() is None, run.process.communicate()
        assert time.monotonic() < deadline
        pause()
    moment = time.monotonic() + chance.uniform(0.0, 0.4)
    while time.monotonic() < moment:
        pause()
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait()


@pytest.mark.slow
def test_after_kill_9_at_any_moment_it_goes_on_from_a_whole_checkpoint(start, train, tmp_path):
    chance, done, url = random.Random(5), 0, str(tmp_path / "run")
    for _ in range(KILLS):
        kill_while_it_writes(start(*ONE, "run.steps=100000"), chance, done)
        newest = committed(url)[-1]
        assert newest > done
        assert read_state(url, newest).roles == ["policy"]
        assert read_model(f"{checkpoint_url(url, newest)}/policy")
        done = newest
    resumed = train("run", *ONE, f"run.steps={done + 1}")
    straight = train("straight", *ONE, f"run.steps={done + 1}")
    for step in range(1, done + 2):
        assert (
            resumed.table("rollouts", step)
            .select(EXACT)
            .equals(straight.table("rollouts", step).select(EXACT))
        ), step
    assert [record["step"] for record in resumed.records()] == list(range(1, done + 2))
    models = [
        read_model(f"{checkpoint_url(str(run.url), done + 1)}/policy")
        for run in (resumed, straight)
    ]
    assert all(models[0][name].equal(models[1][name]) for name in models[1])
    assert committed(url) == [done, done + 1]
