"""A process that computes or reads gets something done, and one that waits does not."""

import subprocess
import sys
import time

from siirl_dask.worker.monitoring import activity
from siirl_dask.worker.monitoring.activity import Counts, counts_as_progress
from siirl_dask.worker.monitoring.task_progress import TaskProgress


def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


def test_seconds_of_this_process_and_of_what_it_started_count():
    before = Counts.now()
    compute(0.2)
    own = Counts.now()
    assert own.cpu - before.cpu >= 0.19
    assert own.shows_work_since(before, 1.0)
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)  # as a compiler
    assert Counts.now().cpu - own.cpu > 0.05


def test_a_twentieth_of_a_core_is_waiting_and_pages_of_files_are_not():
    before = Counts(cpu=10.0, blocks=1000)
    assert not Counts(cpu=10.05, blocks=1010).shows_work_since(before, 1.0)
    assert Counts(cpu=10.2, blocks=1000).shows_work_since(before, 1.0)
    assert Counts(cpu=10.0, blocks=2000).shows_work_since(before, 1.0)


def test_work_beats_while_inside_and_not_after(monkeypatch):
    monkeypatch.setattr(activity, "_EVERY", 0.05)
    monkeypatch.setattr(activity, "_CORES", 0.0)
    progress = TaskProgress()
    with (
        progress.at("the building of role 'rollout'"),
        counts_as_progress(progress),
        progress.stage("the loading of weights"),
    ):
        assert progress.place == "the building of role 'rollout': the loading of weights"
        before = progress.beats
        while progress.beats == before:
            compute(0.01)
    assert not [
        thread for thread in activity.threading.enumerate() if thread.name == "siirl-activity"
    ]
