"""A cluster that speaks tls: rows go from worker to worker over it, and are those of any other
cluster.
"""

from contextlib import contextmanager

import dask
import pytest
from distributed.security import Security

from siirl_dask.config import ClusterConfig, Config
from siirl_dask.driver.clusters.cluster import connect
from siirl_dask.errors import ConfigError
from siirl_dask.observe import Progress
from tests.clusters import local_cluster

APART = [
    "cluster.workers=2",
    "cluster.placement={rollout: [0], policy: [1]}",
    "data.transport=dask",
    "run.steps=2",
]
SAMPLED = ["row_id", "prompt", "response_ids", "rollout_logprobs", "reward", "advantage"]


@pytest.fixture(scope="module")
def security():
    return Security.temporary()


@pytest.fixture(scope="module")
def tls_cluster(security):
    with local_cluster(2, protocol="tls://", security=security) as cluster:
        yield cluster


@contextmanager
def certificates(security, folder):
    """In files that Dask's configuration names, as a user names them."""
    given = {
        "ca-file": security.tls_ca_file,
        "client.cert": security.tls_client_cert,
        "client.key": security.tls_client_key,
    }
    files = {name: folder / f"{name}.pem" for name in given}
    for name, text in given.items():
        files[name].write_text(text)
    with dask.config.set(
        {f"distributed.comm.tls.{name}": str(file) for name, file in files.items()}
    ):
        yield


def test_rollouts_over_tls_are_those_over_tcp(train, tls_cluster, security, tmp_path):
    address = tls_cluster.scheduler_address
    workers = [nanny.worker_address for nanny in tls_cluster.workers.values()]
    assert all(each.startswith("tls://") for each in (address, *workers))
    with certificates(security, tmp_path):
        over_tls = train("tls", *APART, f"cluster.address={address}")
    over_tcp = train("tcp", *APART)
    assert over_tls.summary.bytes_per_step.peers == over_tcp.summary.bytes_per_step.peers > 0
    for step in (1, 2):
        assert (
            over_tls.table("rollouts", step)
            .select(SAMPLED)
            .equals(over_tcp.table("rollouts", step).select(SAMPLED))
        )


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (
            "tls://127.0.0.1:9",
            r"certificates are named in Dask's configuration, under distributed\.comm\.tls",
        ),
        ("tlss://127.0.0.1:9", "unknown address scheme"),
        ("127.0.0.1", "missing port number"),
    ],
)
def test_an_address_that_cannot_be_reached_so_is_refused_by_name(address, said):
    with (
        pytest.raises(
            ConfigError,
            match=rf"no Dask scheduler answers at cluster\.address='{address}': .*{said}",
        ),
        connect(
            Config(cluster=ClusterConfig(address=address, start_timeout=5.0)),
            Progress(1, enabled=False),
        ),
    ):
        pass
