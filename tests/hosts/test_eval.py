"""``siirl-dask eval`` on several hosts: a checkpoint's weights come through the run's store, and
do not stay there.
"""

import json
import sys

import pyarrow.parquet as pq
import pytest

from siirl_dask.testing.hosts import LabError

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]


def test_a_checkpoint_is_evaluated_on_three_hosts_and_its_weights_do_not_stay(
    cluster_of_three, digits_on, digits_task, tmp_path
):
    own = tmp_path / "own"
    own.mkdir()
    lab, cluster = cluster_of_three(private=[own])
    run = digits_on(cluster, lab.hosts[0], "checkpoint.every=1", "run.steps=1")
    run.succeeds()
    pq.write_table(pq.read_table(digits_task.train).slice(0, 6), tmp_path / "test.parquet")
    command = [
        "eval",
        run.url,
        f"--data={tmp_path}/test.parquet",
        "--n=2",
        "--max-tokens=4",
        "observe.progress=false",
    ]
    several = (
        "-m",
        "siirl_dask.cli",
        *command,
        f"cluster.address={cluster.address}",
        "--workers=3",
    )
    # no other host sees the driver's temporary files
    python = ("env", f"TMPDIR={own}", sys.executable)
    lab.hosts[0].run(*python, *several, env=cluster.environment)
    evaluations = run.url / "evaluations"
    assert [folder.name for folder in evaluations.iterdir()] == ["test-step000001"]
    assert (
        json.loads((evaluations / "test-step000001" / "metrics.json").read_text())["samples"] == 12
    )

    with pytest.raises(LabError, match="exit status 2") as refused:
        lab.hosts[0].run(*python, *several, f"--out={own}/out", env=cluster.environment)
    for host in ("host1", "host2"):
        assert f"on host '{host}' run.url '{own}/out' is another folder there" in str(refused.value)
    assert f"is below --out, here '{own}/out'" in str(refused.value)
    assert lab.hosts[0].run("find", own, "-name", "*.safetensors") == ""
