"""Rows between the workers of a Dask cluster that speaks UCX."""

import importlib.util
import os
import signal
import time

import pyarrow as pa
import pytest
from distributed import Client

from siirl_dask.config import TransportMode
from tests.clusters import local_cluster
from tests.comms.ucxx_here import needs_ucxx
from tests.worker.test_data_plane import (
    edge_of,
    make_part,
    place,
    planes,
    publish_part,
    pull_part,
    seconds_until_it_fails,
)

pytestmark = [
    needs_ucxx,
    pytest.mark.skipif(
        importlib.util.find_spec("distributed_ucxx") is None, reason="needs distributed-ucxx"
    ),
]


def address_on(name, worker, dask_worker):
    """Where a worker is asked at, by another."""
    return dask_worker.plugins[name].plane._network.address_of(worker)


@pytest.fixture(scope="module")
def client():
    with local_cluster(2, protocol="ucxx") as cluster, Client(cluster) as client:
        yield client


def test_rows_of_a_cluster_that_speaks_ucx_go_over_ucx_equal_to_the_bit(client):
    edge = edge_of("01", "1")
    with planes(client, [edge], transport=TransportMode.dask) as (members, name):
        assert all(address.startswith("ucxx://") for address in members.values())
        asked = client.run(address_on, name, "0", workers=[members["1"]])
        assert asked[members["1"]].startswith("rows+ucxx://127.0.0.1:")
        published = [
            client.submit(publish_part, name, edge, 0, i, 3000, 300, workers=[members[str(i)]])
            for i in range(2)
        ]
        pulled = client.submit(pull_part, name, edge, 0, workers=[members["1"]]).result()
        client.gather(published)
        expected = pa.concat_tables([make_part(i, 2, 3000, 300) for i in range(2)])
        assert pulled.equals(expected.sort_by("row_id"))


def test_a_peer_that_is_killed_is_named_over_ucx(client):
    edge = edge_of("01", "1")
    members, name = place(client, [edge], transport=TransportMode.dask)
    pid = client.submit(os.getpid, workers=[members["0"]]).result()
    waiting = client.submit(seconds_until_it_fails, name, edge, 0, workers=[members["1"]])
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    seconds, message = waiting.result(timeout=60)
    assert seconds < 30  # of which cluster.peer_timeout is 5
    assert f"worker '0' at {members['0']}" in message
