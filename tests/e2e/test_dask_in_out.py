"""A Dask collection becomes a run's dataset, and a run is a handle in a program that does other
things: on a cluster of the caller's, also one whose certificates are in memory only.
"""

import asyncio
import re
import threading
from pathlib import Path

import dask.bag
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from distributed import Client, LocalCluster
from omegaconf import OmegaConf
from siirl_storage import open_table

import siirl_dask
from siirl_dask.errors import ConfigError, Interrupted, RunInProgress
from siirl_dask.runs.attempt import take
from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes
from tests.clusters import IDLE, LOST

QUIET = {"distributed.worker.multiprocessing-method": START_METHOD, **LOST, **IDLE}


@pytest.fixture
def composed(digits_task, tmp_path):
    """A configuration as Hydra composes one: a part of a larger config, with interpolations into
    the rest.
    """
    whole = OmegaConf.create(
        {
            "paths": {"runs": str(tmp_path), "model": str(digits_task.model)},
            "train": {
                "run": {"name": "mine", "url": "${paths.runs}/mine", "steps": 2},
                "model": {"path": "${paths.model}"},
                "data": {"batch_size": 8, "max_prompt_length": 32},
                "rollout": {"engine": "transformers", "n": 4, "max_response_length": 8},
                "rewards": {"function": "siirl_dask.tasks.sorting:digit_fraction"},
                "algorithm": {"minibatches": 2},
                "trainer": {"lr": 2e-3},
                "checkpoint": {"every": 1},
                "observe": {"progress": False, "plot": False},
            },
        }
    )
    return whole.train


def rows_of(task):
    table = pq.read_table(task.train)
    return table.select(["prompt", "answer"]).to_pylist()


def bag_of(rows):
    return dask.bag.from_sequence(rows, npartitions=3)


def test_a_run_of_a_bag_resumes_with_the_same_rows_and_refuses_others(
    composed, digits_task, cluster_address, tmp_path
):
    rows = rows_of(digits_task)
    before = set(threading.enumerate())
    with Client(cluster_address, set_as_default=False) as client:
        first = siirl_dask.run(composed, siirl_dask.grpo, client=client, data=bag_of(rows))
        table = open_table(str(tmp_path / "mine" / "data"))
        assert table.to_table().to_pylist() == rows
        composed.run.steps = 3
        with pytest.raises(ConfigError, match=r"has the rows of another collection.*digest is"):
            siirl_dask.run(composed, siirl_dask.grpo, client=client, data=bag_of(rows[1:]))
        with take(str(tmp_path / "mine"), 2.0, print), pytest.raises(RunInProgress):
            siirl_dask.run(
                composed, siirl_dask.grpo, client=client, data=bag_of(rows[1:]), fresh=True
            )
        assert open_table(table.url).version == table.version, "a run that goes on has its rows"
        again = siirl_dask.run(composed, siirl_dask.grpo, client=client, data=bag_of(rows))
        assert (first.steps, again.steps) == (2, 3)
        assert open_table(table.url).version == table.version
        assert client.submit(sum, [1, 2]).result() == 3, "the caller's client stays usable"
        handle = siirl_dask.attach(str(tmp_path / "mine"))
        assert handle.result(60).steps == 3
        sampled = pa.concat_tables(client.gather(client.compute(handle.rollout_tables())))
    left = [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    assert left == [], "the end of the program would wait for it"
    assert set(sampled["step"].to_pylist()) == {1, 2, 3}
    asked = {row["prompt"] for row in rows}
    assert set(sampled["prompt"].to_pylist()) <= asked


def test_a_run_of_a_dataframe_gives_its_samples_as_a_dataframe(
    composed, digits_task, cluster_address, tmp_path
):
    from dask.dataframe import from_pandas  # here: no other test needs pandas
    from pandas import DataFrame

    rows = rows_of(digits_task)
    composed.run.steps = 1
    with Client(cluster_address, set_as_default=False) as client:
        data = from_pandas(DataFrame(rows), npartitions=3)
        handle = siirl_dask.submit(composed, siirl_dask.grpo, client=client, data=data)
        assert handle.result(120).steps == 1
        assert open_table(str(tmp_path / "mine" / "data")).to_table().to_pylist() == rows
        sampled = handle.rollouts()
        assert sampled.npartitions == len(handle.rollout_tables())
        means = client.compute(sampled.groupby("step").reward.mean()).result()
        first = client.compute(sampled).result().iloc[0]
    (record,) = handle.metrics.filter(pc.field("phase") == "train").to_pylist()
    assert means.to_dict() == {1: pytest.approx(record["reward/mean"])}
    assert list(first.response_ids), "lists stay lists"


async def follow(handle, steps):
    """Return the training steps that the handle tells of, until there are ``steps``."""
    seen = []
    async for record in handle:
        seen.append(record["step"])
        if len(seen) == steps:
            break
    return seen


def test_a_run_is_a_handle_in_an_event_loop_with_certificates_in_memory(
    composed, digits_task, tmp_path
):
    rows = rows_of(digits_task)
    composed.run.steps = 200
    url = str(tmp_path / "mine")

    async def work(cluster):
        async with Client(
            cluster.scheduler_address,
            security=cluster.security,
            asynchronous=True,
            set_as_default=False,
        ) as client:
            with pytest.raises(ConfigError, match=r"use siirl_dask\.submit"):
                siirl_dask.run(composed, siirl_dask.grpo, client=client)
            handle = siirl_dask.submit(composed, siirl_dask.grpo, client=client, data=bag_of(rows))
            assert await follow(handle, 2) == [1, 2]
            assert handle.status == "running"
            handle.cancel()
            assert handle.status == "stopping"
            with pytest.raises(Interrupted, match="the checkpoint of step"):
                await handle
            assert handle.status == "interrupted"
            done = handle.run.checkpoints[-1]
            assert done == handle.run.steps[-1] >= 2

            handle = siirl_dask.submit(composed, siirl_dask.grpo, client=client, data=bag_of(rows))
            seen = await follow(handle, 1)
            assert seen == [done + 1], "it goes on after the checkpoint"
            other = siirl_dask.attach(url, client)
            assert (await follow(other, 1)) == [1]
            other.cancel(at_once=True)
            with pytest.raises(Interrupted):
                await handle
            with pytest.raises(Interrupted):
                await other
            parts = await client.gather(client.compute(other.rollout_tables(steps=[1])))
            assert len(parts) == 2
            return handle.run.steps

    prepare_processes()
    with (
        dask.config.set(QUIET),
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            memory_limit=0,
            host="127.0.0.1",
            dashboard_address=None,
            silence_logs=50,
            security=True,
            protocol="tls://",
        ) as cluster,
    ):
        assert cluster.scheduler_address.startswith("tls://")
        steps = asyncio.run(work(cluster))
    assert steps == list(range(1, len(steps) + 1))
    assert siirl_dask.open_run(url).summary.status == "interrupted"


def of_page(opening):
    """Return the code block of the page of configurations that begins with a line."""
    text = Path(__file__).parents[2].joinpath("docs", "configuration.md").read_text()
    return re.search(rf"```\w+\n{re.escape(opening)}\n(.*?)```", text, re.DOTALL)[1]


def test_the_script_of_the_page_trains_what_hydra_composes(digits_task, cluster_address, tmp_path):
    """Hydra itself is not installed here: it gives the script such a DictConfig."""
    composed = OmegaConf.create(of_page("# conf/experiment.yaml"))
    composed.paths = {"runs": str(tmp_path), "task": str(digits_task.train.parent)}
    composed.train.cluster = {"address": cluster_address, "workers": 1, "placement": {}}
    composed.train.run.steps = 1
    composed.train.model.path = str(digits_task.model)
    composed.train.data |= {"url": str(digits_task.train), "batch_size": 8, "prepare": None}
    composed.train.validation = {"url": None, "test_url": None}
    composed.train.rollout = {"engine": "transformers", "n": 4}
    script: dict[str, object] = {"__name__": "train"}
    exec(compile(of_page("# train.py"), "train.py", "exec"), script)
    script["train"](composed)
    assert siirl_dask.open_run(str(tmp_path / "hydra")).steps == [1]
