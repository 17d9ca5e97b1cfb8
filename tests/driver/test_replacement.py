"""Workers that answer nothing are given up before a run goes on: it could not begin beside one."""

import os
import signal
import time

import pytest

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.recovery import replacement
from siirl_dask.driver.recovery.replacement import remove_unusable_workers
from siirl_dask.driver.recovery.worker_group import WorkerGroup
from siirl_dask.errors import SilentPeer

PATIENCE, LAST_CHANCE = 1.0, 0.2


@pytest.fixture
def workers(cluster, monkeypatch):
    """A client, the addresses of three workers, and a group of the first two; the last two stand
    still for a while.
    """
    monkeypatch.setattr(replacement, "_LAST_CHANCE", LAST_CHANCE)
    client = cluster(a={}, b={}, c={})
    pids = client.run(os.getpid)
    named = {
        info["name"]: at for at, info in client.scheduler_info(n_workers=-1)["workers"].items()
    }
    for name in "bc":
        os.kill(pids[named[name]], signal.SIGSTOP)
    late = time.monotonic() + 60
    while sorted(silences(client).values())[1] < PATIENCE:
        assert time.monotonic() < late
        time.sleep(0.05)
    group = WorkerGroup(
        {name: named[name] for name in "ab"}, Config(cluster=ClusterConfig(peer_timeout=PATIENCE))
    )
    return client, [named[name] for name in "abc"], group


def silences(client):
    """Seconds of each worker since its last sign of life, before that of the last one that gave
    any.
    """
    seen = {
        at: info["last_seen"] for at, info in client.scheduler_info(n_workers=-1)["workers"].items()
    }
    return {address: max(seen.values()) - since for address, since in seen.items()}


def test_who_was_silent_for_long_has_a_last_chance_if_peers_have_found_it_and_idle_workers_are_asked_too(
    workers,
):
    client, (lives, member, idle), group = workers
    timeouts = replacement._answer_timeouts(client, group, None, was_silent=True)
    assert timeouts == {lives: PATIENCE, member: LAST_CHANCE, idle: LAST_CHANCE}
    assert {*replacement._answer_timeouts(client, group, None, was_silent=False).values()} == {
        PATIENCE
    }
    remove_unusable_workers(client, group, SilentPeer("x"), None)
    assert [*client.scheduler_info(n_workers=-1)["workers"]] == [lives]
