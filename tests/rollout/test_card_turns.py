"""Workers that share a card: their engines sleep and wake in turn. A stand-in for ``vllm.LLM`` records when."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import ConfigError
from siirl_dask.rollout.vllm_engine import card_turns
from siirl_dask.rollout.vllm_engine.card_turns import CardTurns, own_folder
from siirl_dask.rollout.vllm_engine.sleeping import Sleep
from siirl_dask.testing.ranks import run_ranks

ALONE = Device("w", DeviceKind.CUDA, 0, "GPU-5c3a/1")
SHARED = replace(ALONE, shared_by=2)
_HOLD = 0.02  # seconds that the stand-in takes: other processes begin theirs meanwhile, if nothing keeps them


class Slow:
    """An engine that records when each of its sleeps and wakes began and ended, by the clock of the host."""

    def __init__(self):
        self.intervals = []

    def sleep(self, level):
        self._take_time()

    def wake_up(self, tags=None):
        self._take_time()

    def collective_rpc(self, method):
        pass

    def apply_model(self, function):
        return [function(torch.nn.Module())]

    def _take_time(self):
        begun = time.monotonic()
        time.sleep(_HOLD)
        self.intervals.append([begun, time.monotonic()])


def intervals_of(rank, workers, folder):
    """Sleep and wake as in ten steps; return the intervals, and the files that are there for locks."""
    tempfile.tempdir = folder
    engine = Slow()
    device = replace(ALONE, shared_by=workers)
    sleep = Sleep(engine, 2, device, CardTurns(device))
    dist.barrier()
    for _ in range(10):
        sleep.begin(weights_follow=True)
        sleep.wake_weights()
        sleep.loaded()
        sleep.end()
    dist.barrier()
    return [engine.intervals, sorted(made.name for made in Path(folder).iterdir())]


def both(workers, tmp_path):
    """Return the intervals of two workers by their beginnings, and the files for locks; ``workers`` share a card."""
    locks, ranks = tmp_path / "locks", tmp_path / "ranks"
    for folder in (locks, ranks):
        folder.mkdir()
    (first, files), (second, _) = run_ranks(2, partial(intervals_of, workers=workers, folder=str(locks)), ranks)
    assert len(first) == len(second) == 30
    return sorted([*first, *second]), files


def test_engines_of_one_card_never_sleep_or_wake_at_once(tmp_path):
    intervals, files = both(2, tmp_path)
    overlapping = sum(following[0] < before[1] for before, following in pairwise(intervals))
    assert overlapping == 0
    assert files == [f"siirl_dask-{os.getuid()}"]


def test_an_engine_that_is_alone_on_its_card_takes_no_lock(tmp_path):
    intervals, files = both(1, tmp_path)
    assert files == []
    assert len(intervals) == 60


def test_the_wait_for_another_engine_counts_as_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    waits = []

    class Waits:
        def __enter__(self):
            waits.append("begun")

        def __exit__(self, *raised):
            waits.append("over")

    turns = CardTurns(replace(SHARED, waiting=Waits))
    with turns.taken():
        assert waits == ["begun", "over"]
    with pytest.raises(RuntimeError, match="asleep"), turns.taken():
        raise RuntimeError("asleep")
    with CardTurns(SHARED).taken():
        pass  # the one that failed gave its turn back


HOLDER = """
import sys, time, tempfile
from siirl_dask.context import Device, DeviceKind
from siirl_dask.rollout.vllm_engine.card_turns import CardTurns
tempfile.tempdir = sys.argv[1]
with CardTurns(Device("w", DeviceKind.CUDA, 0, "GPU-5c3a/1", 2)).taken():
    print("taken", flush=True)
    time.sleep(600)
"""


def test_a_worker_that_is_killed_in_its_turn_leaves_it_to_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"taken\n"
            turns = CardTurns(SHARED)
            assert not _is_free(turns)
        finally:
            holder.kill()
    with turns.taken():
        pass


def _is_free(turns):
    try:
        turns._lock.acquire(blocking=False)
    except TimeoutError:
        return False
    turns._lock.release()
    return True


def test_a_folder_that_others_could_write_to_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"siirl_dask-{os.getuid()}"
    assert own_folder() == own_folder() == folder
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"siirl_dask-\d+: .* its mode is 777: remove it, or let TMPDIR"):
        own_folder()
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="it is a link"):
        own_folder()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(ConfigError, match="File exists"):
        own_folder()
    folder.unlink()
    own_folder()
    other = os.getuid() + 1
    folder.rename(tmp_path / f"siirl_dask-{other}")
    monkeypatch.setattr(card_turns.os, "getuid", lambda: other)
    with pytest.raises(ConfigError, match=f"user {other - 1} has made it"):
        own_folder()
