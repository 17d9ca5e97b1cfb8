"""A run on a cluster of its user's: the cluster adapts to it, it takes the workers that it is meant to
have, and others go on working there.
"""

import copy
import time

import dask
import pytest
from distributed import Client, Nanny, Scheduler, SpecCluster, as_completed, performance_report

import siirl_dask
from siirl_dask.errors import ConfigError, Interrupted, RunError
from siirl_dask.scheduler.idle_workers import other_runs
from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes
from tests.clusters import IDLE, LOST, local_cluster


@pytest.fixture
def config(digits_task, tmp_path):
    return {
        "base": "siirl_dask:dags/grpo.yaml",
        "run": {"name": "guest", "url": str(tmp_path / "guest"), "steps": 3},
        "cluster": {"start_timeout": 60},
        "model": {"path": str(digits_task.model)},
        "data": {"url": str(digits_task.train), "batch_size": 8, "max_prompt_length": 32},
        "rollout": {"engine": "transformers", "n": 4, "max_response_length": 8},
        "rewards": {"function": "siirl_dask.tasks.sorting:digit_fraction"},
        "algorithm": {"minibatches": 2},
        "trainer": {"lr": 2e-3},
        "observe": {"progress": False, "plot": False},
    }


def members(client):
    """Return the addresses of the workers that runs have."""
    return set(client.run_on_scheduler(lambda dask_scheduler: other_runs(dask_scheduler)))


def worker_of(number):
    """Work for a while, and return where."""
    from distributed import get_worker

    time.sleep(0.25)
    return get_worker().address


def until(reached, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cluster_that_adapts_starts_the_workers_of_a_run_and_more_for_others(config):
    config["run"]["steps"] = 500
    with local_cluster(0) as cluster, Client(cluster, set_as_default=False) as client:
        cluster.adapt(
            Adaptive=siirl_dask.Adaptive, minimum=0, maximum=3, interval="100ms", wait_count=2
        )
        handle = siirl_dask.submit(config, client=client)
        assert next(iter(handle))["step"] == 1
        own = members(client)
        assert len(own) == len(client.scheduler_info()["workers"]) == 2
        busy = client.map(worker_of, range(400), pure=False)
        done = as_completed(busy, loop=client.loop, with_results=True)
        assert any(used not in own for _, used in done), "tasks of others have their own worker"
        assert handle.status == "running"
        client.cancel(busy)
        del busy, done
        until(lambda: len(client.scheduler_info()["workers"]) == 2)
        assert set(client.scheduler_info()["workers"]) == own, "a run keeps its workers"
        handle.cancel()
        handle.exception(60)
        until(lambda: not client.scheduler_info()["workers"])


def test_a_cluster_that_adapts_by_dasks_own_rule_is_said_what_to_do(config):
    config["cluster"]["start_timeout"] = 1
    with local_cluster(0) as cluster, Client(cluster, set_as_default=False) as client:
        cluster.adapt(minimum=0, maximum=2, interval="100ms")
        with pytest.raises(RunError, match=r"0 of 2 workers.*Adaptive=siirl_dask\.Adaptive"):
            siirl_dask.run(config, client=client)


def test_two_runs_at_once_share_no_worker_and_the_later_one_waits(config):
    config["run"]["steps"] = 500
    later = copy.deepcopy(config)
    later["run"] |= {"url": config["run"]["url"] + "-later", "steps": 2}
    with local_cluster(3) as cluster, Client(cluster, set_as_default=False) as client:
        client.wait_for_workers(3, timeout=60)
        first = siirl_dask.submit(config, client=client)
        assert next(iter(first))["step"] == 1
        own = members(client)
        alone = copy.deepcopy(later)
        alone["run"]["url"] += "-alone"
        alone["cluster"]["workers"] = 1
        assert siirl_dask.run(alone, client=client).steps == 2, "on the third worker"
        refused = copy.deepcopy(later)
        refused["cluster"]["start_timeout"] = 1
        with pytest.raises(RunError, match=r"1 of 2 workers were free .* other runs use 2 workers"):
            siirl_dask.run(refused, client=client)
        waiting = siirl_dask.submit(later, client=client)
        assert members(client) == own
        assert first.status == "running"
        first.cancel()
        assert waiting.result(60).steps == 2
        assert isinstance(first.exception(60), Interrupted)


@pytest.fixture
def unlike_workers():
    """A cluster of three workers, of which the first has no GPU by its resources."""
    options = {"nthreads": 1, "memory_limit": 0, "host": "127.0.0.1", "silence_logs": 50}
    with_gpu = {"cls": Nanny, "options": {**options, "resources": {"GPU": 1}}}
    settings = {"distributed.worker.multiprocessing-method": START_METHOD, **LOST, **IDLE}
    scheduler = {"host": "127.0.0.1", "port": 0, "dashboard": False}
    prepare_processes()
    with (
        dask.config.set(settings),
        SpecCluster(
            workers={0: {"cls": Nanny, "options": options}, 1: with_gpu, 2: with_gpu},
            scheduler={"cls": Scheduler, "options": scheduler},
            silence_logs=50,
        ) as cluster,
    ):
        yield cluster


def used_resources(dask_scheduler):
    return {
        address: dict(worker.used_resources) for address, worker in dask_scheduler.workers.items()
    }


def test_a_run_takes_workers_with_its_resources_and_claims_them(config, unlike_workers):
    config["cluster"]["resources"] = {"GPU": 1}
    config["run"]["steps"] = 500
    with Client(unlike_workers, set_as_default=False) as client:
        client.wait_for_workers(3, timeout=60)
        info = client.scheduler_info()["workers"]
        fit = {address for address, worker in info.items() if worker["resources"]}
        assert len(fit) == 2
        handle = siirl_dask.submit(config, client=client)
        assert next(iter(handle))["step"] == 1
        assert members(client) == fit
        claimed = client.run_on_scheduler(used_resources)
        assert all(claimed[address]["GPU"] >= 1 for address in fit), claimed
        on_gpus = client.map(worker_of, range(2), resources={"GPU": 1}, pure=False)
        assert set(client.gather(on_gpus)) <= fit, "others have their turn between two steps"
        assert set(client.gather(client.map(worker_of, range(2), pure=False)))
        assert handle.status == "running"
        handle.cancel()
        handle.exception(60)
        config["run"]["url"] += "-2"
        config["cluster"] |= {"workers": 3, "start_timeout": 1}
        with pytest.raises(RunError, match=r"2 of 3 workers with cluster.resources=.*GPU"):
            siirl_dask.run(config, client=client)


def test_resources_that_no_worker_can_have_are_refused(config):
    config["cluster"]["resources"] = {"GPU": 1}
    with pytest.raises(ConfigError, match="the run starts on this machine have no resources"):
        siirl_dask.run(config)
    config["cluster"]["resources"] = {"GPU": 0}
    with pytest.raises(ConfigError, match="expected more than 0 of GPU"):
        siirl_dask.run(config)


def test_workers_of_a_run_are_retired_and_a_report_has_its_tasks(config, tmp_path):
    config["run"]["steps"] = 12
    config["cluster"] |= {"elastic": True}
    report = tmp_path / "report.html"
    with local_cluster(2) as cluster, Client(cluster) as client:
        with performance_report(filename=str(report)):
            handle = siirl_dask.submit(config, client=client)
            assert next(iter(handle))["step"] == 1
            retired = sorted(members(client))[0]
            client.retire_workers([retired])
            summary = handle.result(120)
        assert summary.steps == 12
        assert retired not in client.scheduler_info()["workers"]
    assert handle.run.steps == list(range(1, 13))
    assert "siirl-train" in report.read_text()
