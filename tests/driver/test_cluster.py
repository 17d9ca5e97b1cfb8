"""The cluster that a run starts on this machine ends with the run, whatever its workers are
doing.
"""

import asyncio
import sys
import time
from multiprocessing import spawn

import pytest
from distributed import Nanny

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.clusters.cluster import connect
from siirl_dask.driver.clusters.nanny import main_not_imported
from siirl_dask.observe import Progress


def _block(entered):
    entered.touch()
    time.sleep(10**6)


def _interrupt_a_blocked_worker(entered):
    """Leave a cluster by Ctrl-C while a worker is in a task that never returns; the workers are
    killed before they are retired, as it happens on a busy machine.
    """
    with connect(Config(cluster=ClusterConfig(workers=2)), Progress(1, enabled=False)) as client:
        scheduler, nannies = client.cluster.scheduler, list(client.cluster.workers.values())
        processes = {nanny.pid for nanny in nannies}
        retire_workers = scheduler.handlers["retire_workers"]

        async def retire_late(*args, **options):
            while any(nanny.pid in processes for nanny in nannies):
                await asyncio.sleep(0.01)
            return await retire_workers(*args, **options)

        scheduler.handlers["retire_workers"] = retire_late
        future = client.submit(_block, entered, pure=False)
        while not entered.exists():
            assert future.status == "pending"
            time.sleep(0.05)
        raise KeyboardInterrupt


def test_a_worker_that_never_returns_is_ended_and_not_restarted(monkeypatch, tmp_path):
    starts = []
    instantiate = Nanny.instantiate
    monkeypatch.setattr(
        Nanny, "instantiate", lambda nanny: (starts.append(nanny.name), instantiate(nanny))[1]
    )
    with pytest.raises(KeyboardInterrupt):
        _interrupt_a_blocked_worker(tmp_path / "entered")
    assert sorted(starts) == [0, 1]


def _argument_of_main(name):
    return {key for key in spawn.get_preparation_data(name) if key.startswith("init_main")}


def test_only_workers_start_without_the_main_module_and_only_while_a_cluster_is_there(monkeypatch):
    """A process that a script starts by itself needs its main module."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    there = _argument_of_main("Dask Worker process (from Nanny)")
    assert there
    with main_not_imported():
        assert not _argument_of_main("Dask Worker process (from Nanny)")
        assert _argument_of_main("Process-1") == there
    assert _argument_of_main("Dask Worker process (from Nanny)") == there
