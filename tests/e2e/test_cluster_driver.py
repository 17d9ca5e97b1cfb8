"""A driver on the cluster: the run goes on without the process that has submitted it and without the
worker that the driver was on, with the same rows.
"""

import json
import os
import signal
import subprocess
import sys
import time

import dask.bag
import pyarrow.parquet as pq
import pytest
from distributed import Client

import siirl_dask
from siirl_dask.errors import ConfigError, Interrupted
from siirl_dask.scheduler.idle_workers import DRIVERS
from tests.clusters import local_cluster
from tests.conftest import Finished
from tests.e2e.test_resume import EXACT

SUBMIT = """
import json, sys
from distributed import Client
import dask.bag
import siirl_dask

if __name__ == "__main__":
    address, config, rows = map(json.loads, sys.argv[1:])
    client = Client(address)
    bag = dask.bag.from_sequence(rows, npartitions=3)
    run = siirl_dask.submit(config, client=client, data=bag, driver="cluster")
    print(next(iter(run))["step"], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def rows(digits_task):
    return pq.read_table(digits_task.train).select(["prompt", "answer"]).to_pylist()


@pytest.fixture
def config(digits_task, tmp_path):
    return {
        "base": "siirl_dask:dags/grpo.yaml",
        "run": {"name": "far", "url": str(tmp_path / "far"), "steps": 12, "lease": 2},
        "model": {"path": str(digits_task.model)},
        "data": {"batch_size": 8, "max_prompt_length": 32},
        "rollout": {"engine": "transformers", "n": 4, "max_response_length": 8},
        "rewards": {"function": "siirl_dask.tasks.sorting:digit_fraction"},
        "algorithm": {"minibatches": 2},
        "trainer": {"lr": 2e-3},
        "checkpoint": {"every": 2},
        "observe": {"progress": False, "plot": False},
    }


def trained_here(config, rows, client, tmp_path):
    """Train the same run with a driver in this process."""
    config = {**config, "run": {**config["run"], "url": str(tmp_path / "here")}}
    bag = dask.bag.from_sequence(rows, npartitions=3)
    return Finished(tmp_path / "here", siirl_dask.run(config, client=client, data=bag))


def check_same_rows(far, here):
    steps = [record["step"] for record in here.records()]
    assert [record["step"] for record in far.records()] == steps
    for step in steps:
        expected = here.table("rollouts", step).select(EXACT)
        assert far.table("rollouts", step).select(EXACT).equals(expected), step


def driver_of(client):
    """Return the address of the worker that has a driver; None where none has."""

    def look(dask_scheduler):
        for address, worker in dask_scheduler.workers.items():
            if any(str(task.key).startswith(DRIVERS) for task in worker.processing):
                return address
        return None

    return client.run_on_scheduler(look)


def test_a_run_goes_on_without_the_process_that_has_submitted_it(
    config, rows, cluster_address, tmp_path
):
    arguments = [json.dumps(value) for value in (cluster_address, config, rows)]
    command = [sys.executable, "-c", SUBMIT, *arguments]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "1\n"
        process.kill()
    with Client(cluster_address, set_as_default=False) as client:
        assert driver_of(client) is not None
        found = siirl_dask.attach(config["run"]["url"], client)
        summary = found.result(120)
        assert summary.steps == 12
        assert summary.status == "complete"
        here = trained_here(config, rows, client, tmp_path)
        deadline = time.monotonic() + 20
        while driver_of(client) is not None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    check_same_rows(Finished(tmp_path / "far", summary), here)


def test_a_driver_that_is_lost_with_its_worker_goes_on_on_another(config, rows, tmp_path):
    config["run"]["steps"] = 20
    with local_cluster(3) as cluster, Client(cluster, set_as_default=False) as client:
        bag = dask.bag.from_sequence(rows, npartitions=3)
        handle = siirl_dask.submit(config, client=client, data=bag, driver="cluster", fresh=True)
        for record in handle:
            if record["step"] == 3:
                break
        first = driver_of(client)
        (pid,) = client.run(os.getpid, workers=[first]).values()
        os.kill(pid, signal.SIGKILL)
        summary = handle.result(150)
        assert summary.status == "complete"
        assert summary.steps == 20
        assert siirl_dask.open_run(handle.url).steps == list(range(1, 21))
        here = trained_here(config, rows, client, tmp_path)
    check_same_rows(Finished(tmp_path / "far", summary), here)


def test_the_handle_of_a_driver_on_the_cluster_follows_cancels_and_says_what_is_wrong(
    config, rows, cluster_address
):
    config["run"]["steps"] = 500
    bag = dask.bag.from_sequence(rows, npartitions=3)
    with Client(cluster_address, set_as_default=False) as client:
        with pytest.raises(ConfigError, match="driver='moon': expected 'here' or 'cluster'"):
            siirl_dask.submit(config, client=client, driver="moon")
        futures = client.scatter(rows[:2])
        with pytest.raises(ConfigError, match="data= has futures"):
            siirl_dask.submit(config, client=client, data=futures, driver="cluster")
        handle = siirl_dask.submit(config, client=client, data=bag, driver="cluster")
        seen = []
        for record in handle:
            seen.append(record["step"])
            if len(seen) == 2:
                handle.cancel()
        assert seen == list(range(1, len(seen) + 1)), "all records come, and each once"
        with pytest.raises(Interrupted, match="the checkpoint of step"):
            handle.result(60)
        assert handle.status == "interrupted"
        handle = siirl_dask.submit(config, client=client, data=bag, driver="cluster")
        handle.cancel(at_once=True)
        with pytest.raises(Interrupted):
            handle.result(60)
        other = dask.bag.from_sequence(rows[1:], npartitions=3)
        handle = siirl_dask.submit(config, client=client, data=other, driver="cluster")
        with pytest.raises(ConfigError, match="has the rows of another collection"):
            handle.result(60)
        assert handle.status == "failed"
