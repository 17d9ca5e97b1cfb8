"""Backends of other projects, in the mode in which they need no network: two starts are one run
there.

Each runs in a process of its own, because they change what is global in one. A package that is not
installed skips its test. None is in CI: see docs/status.md.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ID = "0123456789abcdef01234"


def needs(package):
    spec = find_spec(package)
    absent = spec is None or spec.origin is None
    return pytest.mark.skipif(
        absent, reason=f"{package} is not installed: pip install 'siirl_dask[{package}]'"
    )


def python(folder, code, **variables):
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def two_starts(folder, backend, **variables):
    python(
        folder,
        f"from tests.observe.test_backends import twice; twice({backend!r}, '.')",
        **variables,
    )


@needs("wandb")
def test_wandb_keeps_both_starts_under_one_id_offline(tmp_path):
    two_starts(tmp_path, "wandb", WANDB_MODE="offline", WANDB_SILENT="true")
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{ID}/run-{ID}.wandb"))
    assert len(files) == 2
    texts = [file.read_bytes() for file in files]
    for text in texts:
        assert b"validation/reward/mean" in texts[0]
        assert b"reward/mean" in text
        assert b'"trainer"' in text or b"trainer" in text
    assert b"interrupted" in texts[0]
    assert b"complete" in texts[1]


@needs("wandb")
def test_wandb_without_a_key_says_so_and_asks_nobody(tmp_path):
    code = (
        "from tests.observe.test_backends import *; said = []; tracker = "
        "Tracker([MetricsBackend.wandb], said.append)\n"
        "tracker.begin(tracked('.'), None); tracker.write(train(1, 0.5)); "
        "tracker.end(Status.COMPLETE); print(said)"
    )
    said = python(
        tmp_path, code, WANDB_MODE="online", WANDB_API_KEY="", NETRC=str(tmp_path / "none")
    )
    assert "it has no API key: type `wandb login`" in said


@needs("mlflow")
def test_mlflow_has_one_run_with_all_values(tmp_path):
    where = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    two_starts(tmp_path, "mlflow", **where)
    read = """
import json, mlflow
client = mlflow.MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
history = {
    name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics
}
print(json.dumps([run.info.status, run.info.run_name, run.data.params, history]))
"""
    status, name, params, history = json.loads(python(tmp_path, read, **where).splitlines()[-1])
    assert (status, name, params) == ("FINISHED", "mine", {"trainer.lr": "0.001"})
    assert sorted(history["reward/mean"]) == [[1, 0.25], [2, 0.5], [2, 0.5], [3, 1.0]]
    assert history["validation/reward/mean"] == [[1, 0.75]]
    assert "pass_at_8" in history


@needs("swanlab")
def test_swanlab_keeps_both_starts_under_one_id_offline(tmp_path):
    two_starts(tmp_path, "swanlab", SWANLAB_MODE="offline")
    files = sorted(tmp_path.glob(f"swanlog/run-*-{ID}/run-{ID}.swanlab"))
    assert len(files) == 2
    assert b"validation/reward/mean" in files[0].read_bytes()
    assert all("lr" in (file.parent / "files" / "config.yaml").read_text() for file in files)


@needs("trackio")
def test_trackio_has_one_run_with_all_values(tmp_path):
    two_starts(tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    with closing(sqlite3.connect(tmp_path / "trackio" / "tests.db")) as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    assert {name for name, _, _ in rows} == {f"mine-{ID[:6]}"}
    values = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert [(step, one["reward/mean"]) for step, one in values if "reward/mean" in one] == [
        (1, 0.25), (2, 0.5), (2, 0.5), (3, 1.0)
    ]  # fmt: skip
    assert (1, {"validation/reward/mean": 0.75}) in values
    assert values[-1] == (3, {"status": "complete"})
    assert [json.loads(config)["trainer"] for (config,) in configs] == [{"lr": 0.001}]


@needs("aim")
def test_aim_has_one_run_with_all_values(tmp_path):
    two_starts(tmp_path, "aim", AIM_REPO=str(tmp_path))
    read = """
import json, aim
repo = aim.Repo(".")
(name,) = repo.list_all_runs()
run = aim.Run(name, repo=repo, system_tracking_interval=None, capture_terminal_logs=False)
found = []
for metric in run.metrics():
    steps, (values, *_) = metric.data.numpy()
    found.append([metric.name, metric.context.to_dict()["phase"], list(zip(steps.tolist(), values.tolist()))])
print(json.dumps([run["status"], run["config"]["trainer"]["lr"], found]))
"""
    status, rate, found = json.loads(python(tmp_path, read).splitlines()[-1])
    assert (status, rate) == ("complete", 0.001)
    values = {(name, phase): value for name, phase, value in found}
    assert values["reward/mean", "train"] == [[1, 0.25], [2, 0.5], [3, 1.0]]
    assert values["reward/mean", "validation"] == [[1, 0.75]]
