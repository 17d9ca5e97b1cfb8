"""Whole runs, as a user starts them: the quickstart, and a task that learns in few steps in each
placement.
"""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from siirl_dask.context import DeviceKind
from tests.gpu import devices

pytestmark = pytest.mark.gpu(packages=["dask", "distributed", "omegaconf", "bokeh"])
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.gpu(packages=["vllm"]))]
# float32, since bfloat16, which a GPU has by default, halves the bytes that travel, and its attention
# adds gradients up in any order
APART = [
    "cluster.workers=2",
    "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
    "model.dtype=float32",
]
ALONE = ["cluster.workers=1", "cluster.placement={}"]
# a first start compiles kernels
START = ["rollout.vllm.kv_cache_memory=256MiB", "cluster.start_timeout=600"]
ON_CPU = devices.ON_CPU
LARGEST_KL = 1e-3
"""Between engine and trainer, which have the same weights: log-probs in float32 differ by 1e-5."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    from siirl_dask.tasks.sorting import write_digits_task

    return write_digits_task(tmp_path_factory.mktemp("digits"))


@pytest.fixture
def train(task, tmp_path):
    """Run the digits task on a cluster of its own; gives the records of its steps, and the rows
    of the last one.
    """

    def start(name, *overrides):
        from siirl_dask.config.file import load_config_file, shipped
        from siirl_dask.driver.phases import dags
        from siirl_dask.driver.run import run
        from tests.settings import digits_overrides

        url = tmp_path / name
        settings = [*digits_overrides(task, url), *START, *overrides]
        file = load_config_file(shipped("quickstart.yaml"), settings)
        summary = run(file.config, *dags(file))
        assert summary.status == "complete"
        lines = map(json.loads, (url / "metrics.jsonl").read_text().splitlines())
        metrics = [line["metrics"] for line in lines if line["phase"] == "train"]
        rows = pq.read_table(url / "rollouts" / f"step={len(metrics):06d}").sort_by("row_id")
        return metrics, rows

    return start


def agree(metrics, largest=LARGEST_KL):
    assert all(step["mismatch/kl"] < largest for step in metrics), [
        step["mismatch/kl"] for step in metrics
    ]


@pytest.mark.parametrize("backend", ["torch", "fsdp"])
@pytest.mark.parametrize("engine", ENGINES)
def test_one_device_generates_and_learns_saves_and_resumes(train, engine, backend):
    one = [*ALONE, f"rollout.engine={engine}", f"trainer.backend={backend}", "checkpoint.every=1"]
    metrics, _ = train("run", *one, "run.steps=2")
    resumed, _ = train("run", *one, "run.steps=3")
    agree([*metrics, *resumed])
    assert len(resumed) == 3


def test_two_workers_share_a_device(train):
    metrics, _ = train("shared", *APART, "rollout.weight_sync=broadcast")
    agree(metrics)
    assert all(step["bytes/broadcast"] > 300_000 for step in metrics)


@pytest.mark.gpu(devices=2)
@pytest.mark.parametrize("backend", ["torch", "fsdp"])
@pytest.mark.parametrize("engine", ENGINES)
def test_weights_by_broadcast_give_the_run_that_rows_give(train, engine, backend):
    apart = [*APART, f"rollout.engine={engine}", f"trainer.backend={backend}", "run.steps=2"]
    rows, expected = train("rows", *apart, "rollout.weight_sync=rows")
    broadcast, got = train(
        "broadcast", *apart, f"rollout.weight_sync={'broadcast' if ON_CPU else 'auto'}"
    )
    assert got["response_ids"].equals(expected["response_ids"])
    agree([*rows, *broadcast])
    for one, other in zip(rows, broadcast, strict=True):
        assert other["policy/loss"] == pytest.approx(one["policy/loss"], abs=1e-4)
        assert other["bytes/broadcast"] > 300_000
        assert "bytes/broadcast" not in one


@pytest.mark.gpu(devices=4)
def test_two_devices_generate_while_two_learn_in_shards(train):
    placed = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"
    metrics, _ = train(
        "four", "cluster.workers=4", placed, "trainer.backend=fsdp", "rollout.max_staleness=1"
    )
    assert len(metrics) == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_the_quickstart_learns_on_the_device(tmp_path, tell, engine):
    steps, task, url = 3 if ON_CPU else 40, tmp_path / "task", tmp_path / "quickstart"
    options = {
        "run.url": url,
        "run.steps": steps,
        "data.url": task / "train.parquet",
        "model.path": task / "model",
        "validation.url": task / "validation.parquet",
        "validation.test_url": task / "test.parquet",
        "rollout.engine": engine,
        "observe.progress": "false",
    }
    command = [
        sys.executable,
        "-m",
        "siirl_dask.cli",
        "quickstart",
        *(f"{key}={value}" for key, value in options.items()),
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    tell("\n".join(done.stdout.splitlines()[:12]))
    accuracy = json.loads((url / "summary.json").read_text())["validation"]
    if devices.kind() is not DeviceKind.CPU:  # three steps on a CPU teach nothing yet
        assert accuracy["last"] > accuracy["first"] + 0.1
