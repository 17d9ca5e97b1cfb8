"""Relative paths are the driver's, wherever the workers run."""

import os
import sys

import pytest

from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.driver.phases import dags
from siirl_dask.driver.run import run
from tests.conftest import Finished, digits_overrides


@pytest.mark.slow
def test_relative_paths_are_those_of_the_driver_for_workers_in_another_folder(
    cluster, digits_task, tmp_path, monkeypatch
):
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    elsewhere.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    client = cluster(a={"folder": elsewhere})
    model, train = (os.path.relpath(path, here) for path in (digits_task.model, digits_task.train))
    overrides = [
        *digits_overrides(digits_task, "run"),
        *(
            f"model.path={model}",
            f"data.url={train}",
            f"validation.url={train}",
            f"validation.test_url={train}",
        ),
        *(
            "run.steps=1",
            "cluster.workers=1",
            "cluster.placement={}",
            f"cluster.address={client.scheduler.address}",
        ),
    ]
    file = load_config_file(shipped("quickstart.yaml"), overrides)
    finished = Finished(here / "run", run(file.config, *dags(file)))
    assert finished.summary.status == "complete"
    assert finished.table("rollouts", 1).num_rows > 0
    assert not [*elsewhere.iterdir()]
    assert "torch" not in client.run_on_scheduler(lambda: [*sys.modules]), (
        "a scheduler that imports it stands still"
    )
