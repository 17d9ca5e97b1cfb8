"""A run on several hosts gives what the same run gives on one, to the bit, wherever their own
names lead.
"""

import json

import pyarrow.parquet as pq
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.testing.hosts import Names
from tests.conftest import digits_overrides
from tests.forked_programs import run_forked
from tests.hosts.conftest import APART

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# a stolen row names the worker that computed it
OVERRIDES = ("checkpoint.every=3", "rollout.work_stealing=false")


def numbers(url):
    """All rows and metrics of a run and the bytes of its weights, but for what is measured in
    seconds.
    """
    rows = {
        path.parent.name: pq.read_table(path.parent).sort_by("row_id")
        for path in url.glob("rollouts/step=*/*")
    }
    lines = map(json.loads, (url / "metrics.jsonl").read_text().splitlines())
    kinds = ("policy/", "reward/", "samples", "tokens", "response_length")
    metrics = [
        {
            name: line["metrics"][name]
            for name in line["metrics"]
            if name.startswith(kinds) and "second" not in name
        }
        for line in lines
    ]
    weights = {path.name: path.read_bytes() for path in url.rglob("*.distcp")}
    assert len(rows) == len(metrics) == 3
    assert weights
    return rows, metrics, weights


def test_a_run_on_three_hosts_equals_the_same_run_on_one_to_the_bit(
    cluster_of_three, digits_on, digits_task, tmp_path
):
    lab, cluster = cluster_of_three(names=Names.LOOPBACK)
    apart = digits_on(cluster, lab.hosts[0], *OVERRIDES)
    apart.succeeds()
    overrides = [
        *digits_overrides(digits_task, tmp_path / "one"),
        "cluster.workers=3",
        APART,
        *OVERRIDES,
    ]
    done = run_forked(
        "-m", "siirl_dask.cli", "run", shipped("quickstart.yaml"), *overrides, folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    rows, metrics, weights = numbers(apart.url)
    expected_rows, expected_metrics, expected_weights = numbers(tmp_path / "one")
    assert all(rows[step].equals(expected_rows[step]) for step in expected_rows)
    assert metrics == expected_metrics
    assert weights == expected_weights
