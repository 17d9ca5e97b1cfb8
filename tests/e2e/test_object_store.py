"""A run whose model, data, rollouts and checkpoints are on S3: the one that it is on local
files.
"""

import json
import os
from uuid import uuid4

import pyarrow.parquet as pq
import pytest
from distributed import Client
from siirl_storage import open_fs, open_table
from transformers import AutoModelForCausalLM

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.models.cache import FOLDER
from siirl_dask.runs.checkpoints import checkpoint_url, committed
from siirl_dask.training.files.checkpoint import read_model
from tests.conftest import digits_overrides

EXACT = ["row_id", "prompt", "response_ids", "reward", "weights_version", "advantage"]


def set_environment(names):
    """Change the environment of the process that runs this; a pickled ``os.environ.update``
    would change a copy.
    """
    os.environ.update(names)


@pytest.fixture
def bucket(s3, digits_task, cluster_address, tmp_path, monkeypatch):
    """A folder of a bucket with model, data, and a few rows of it to evaluate on; the cluster's
    workers reach it.
    """
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    needed = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("AWS_") or name == FOLDER
    }
    with Client(cluster_address) as client:
        client.run(set_environment, needed)
    url = f"{s3}/{uuid4().hex}"
    fs, path = open_fs(url)
    fs.put(f"{digits_task.model}/", f"{path}/tiny/", recursive=True)
    fs.put(str(digits_task.train), f"{path}/train.parquet")
    with fs.open(f"{path}/test.parquet", "wb") as file:
        pq.write_table(pq.read_table(digits_task.train).slice(0, 6), file)
    return url


def test_a_run_on_s3_is_the_one_on_local_files_also_when_it_goes_on(
    bucket, digits_task, cluster_address, tmp_path, capsys
):
    shared = f"cluster.address={cluster_address}"

    def run(url, steps, *overrides):
        given = [
            *digits_overrides(digits_task, url),
            shared,
            "checkpoint.every=1",
            f"run.steps={steps}",
            *overrides,
        ]
        main(["run", str(shipped("quickstart.yaml")), *given])
        return url

    def rollouts(url, step):
        return (
            open_table(f"{url}/rollouts/step={step:06d}").to_table().sort_by("row_id").select(EXACT)
        )

    def model(url):
        return read_model(f"{checkpoint_url(url, committed(url)[-1])}/policy")

    data = (f"data.url={bucket}/train.parquet", f"model.path={bucket}/tiny")
    local = run(str(tmp_path / "run"), 3)
    stored = run(f"{bucket}/run", 2, *data)
    (fetched,) = (folder for folder in (tmp_path / "cache" / "models").iterdir() if folder.is_dir())
    assert (fetched / "config.json").exists()
    run(stored, 3, *data, "observe.progress=true")
    assert "going on after step 2" in capsys.readouterr().out
    for step in (1, 2, 3):
        assert rollouts(stored, step).equals(rollouts(local, step)), step
    trained, expected = model(stored), model(local)
    assert all(trained[name].equal(expected[name]) for name in expected)

    main(["export", stored, f"{bucket}/model"])
    fs, path = open_fs(bucket)
    fs.get(f"{path}/model", str(tmp_path / "model"), recursive=True)
    exported = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    assert exported.keys() == trained.keys()
    assert all(exported[name].equal(trained[name]) for name in trained)

    options = [
        "--n=2",
        "--max-tokens=4",
        "--workers=1",
        f"--out={bucket}/eval",
        shared,
        "observe.progress=false",
    ]
    main(["eval", stored, f"--data={bucket}/test.parquet", *options])
    found = json.loads(fs.cat_file(f"{path}/eval/metrics.json"))
    assert (found["prompts"]["all"], found["samples"]) == (6, 12)
    assert found["temperature"] == 1.0, (
        "the run validated greedily, which several samples cannot be"
    )
    assert not [name for name in fs.find(path) if "/.model-" in name], (
        "the weights of the checkpoint stay in the store"
    )
    there = [folder for folder in (tmp_path / "cache" / "models").iterdir() if folder.is_dir()]
    assert there == [fetched], "the weights of the checkpoint stay on a host"
