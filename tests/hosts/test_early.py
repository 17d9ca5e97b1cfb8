"""Rows travel between hosts while others are generated, and a run gives the same numbers with
and without.
"""

import json

import pytest

from tests.hosts.test_same_numbers import OVERRIDES, numbers

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]
LONG = (
    "rollout.max_response_length=256",
    "rollout.n=32",
    "rollout.max_rows=32",
    "algorithm.minibatches=1",
)


def early(url):
    lines = map(json.loads, (url / "metrics.jsonl").read_text().splitlines())
    return [line["metrics"]["bytes/early"] for line in lines if line["phase"] == "train"]


def test_rows_that_travel_early_between_hosts_change_no_bit(cluster_of_three, digits_on):
    lab, cluster = cluster_of_three()
    runs = {}
    for prefetch in ("null", "false"):
        runs[prefetch] = digits_on(
            cluster,
            lab.hosts[0],
            *OVERRIDES,
            *LONG,
            f"data.prefetch={prefetch}",
            name=f"prefetch-{prefetch}",
        )
        runs[prefetch].succeeds()
    assert all(step > 0 for step in early(runs["null"].url))
    assert early(runs["false"].url) == [0, 0, 0]
    (rows, metrics, weights), (other_rows, other_metrics, other_weights) = (
        numbers(run.url) for run in runs.values()
    )
    assert all(rows[step].equals(other_rows[step]) for step in rows)
    assert metrics == other_metrics
    assert weights == other_weights
