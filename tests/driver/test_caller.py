"""A caller's cluster that will never have enough workers is refused before it is waited for."""

from __future__ import annotations

import pytest
from distributed import Client, LocalCluster

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.caller import RunCaller
from siirl_dask.errors import ConfigError


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(
        n_workers=1, processes=False, dashboard_address=None, silence_logs=50
    ) as cluster:
        yield cluster


@pytest.fixture
def client(cluster):
    with Client(cluster, set_as_default=False) as client:
        yield client


def on_its_cluster(client, workers):
    config = Config(cluster=ClusterConfig(workers=workers))
    return RunCaller(client=client).on_its_cluster(config).cluster.address


def test_a_cluster_that_nothing_enlarges_is_refused_with_both_numbers_and_the_key(client):
    with pytest.raises(ConfigError) as caught:
        on_its_cluster(client, 4)
    said = str(caught.value)
    assert "cluster.workers=4, and the cluster of client= has 1 worker and" in said
    assert "set cluster.workers=1, or" in said
    assert "cluster.scale(4)" in said


def test_a_cluster_that_is_large_enough_or_may_become_so_is_not(client, cluster):
    assert on_its_cluster(client, 1) == cluster.scheduler_address
    with Client(cluster.scheduler_address, set_as_default=False) as by_address:
        assert on_its_cluster(by_address, 4), "others may join it"
    adaptive = cluster.adapt(minimum=1, maximum=4)
    try:
        assert on_its_cluster(client, 4)
        with pytest.raises(ConfigError, match=r"cluster\.workers=5, .* has 4 workers and"):
            on_its_cluster(client, 5)
        cluster.adapt(minimum=1)
        assert on_its_cluster(client, 5), "it adapts without a bound"
    finally:
        cluster.adapt(minimum=1, maximum=1).stop()
        adaptive.stop()
    cluster.scale(2)
    assert on_its_cluster(client, 2), "a worker that comes is waited for"
