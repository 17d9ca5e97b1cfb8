"""Processes of a cluster that do not fit together are refused by name before anything starts;
ranks follow hosts.
"""

import logging
import os
import socket

import pytest

from siirl_dask import __version__
from siirl_dask.driver.clusters.processes import members, rank_order
from siirl_dask.errors import ConfigError

LACKS = "import sys; sys.modules['siirl_dask'] = None"  # as if it were not installed
OTHER = "import siirl_dask; siirl_dask.__version__ = '0.0.9'"


def test_a_scheduler_without_the_package_is_named(cluster):
    client = cluster(scheduler=LACKS, a={})
    with pytest.raises(
        ConfigError,
        match=r"the scheduler at tcp://127\S+ cannot load siirl_dask: ModuleNotFoundError",
    ):
        members(client, 1)


def test_a_worker_without_the_package_is_named_with_its_host(cluster):
    client = cluster(a={}, b={"before": LACKS})
    with pytest.raises(
        ConfigError, match=r"worker 'b' on host '127.0.0.1' cannot load siirl_dask: .*`dask worker`"
    ):
        members(client, 2)


def test_other_versions_are_refused_and_other_variables_are_told_each_by_name(
    cluster, tmp_path, caplog
):
    info = tmp_path / "other" / "torch-2.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.1.0\n")
    other = {"PYTHONPATH": os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])}
    client = cluster(
        a={}, b={"environment": {"NCCL_ALGO": "Ring"}}, c={"before": OTHER, "environment": other}
    )
    # a cluster of another test may have silenced all handlers
    with caplog.at_level(logging.WARNING):
        assert [*members(client, 2)] == ["a", "b"]
    assert "NCCL_ALGO is not set for worker 'a'" in caplog.text
    assert "and 'Ring' for worker 'b'" in caplog.text
    with pytest.raises(ConfigError) as refused:
        members(client, 3)
    host = socket.gethostname()
    assert f"siirl_dask is {__version__} here and 0.0.9 on worker 'c' on host {host!r}" in str(
        refused.value
    )
    assert f"here and 2.1.0 on worker 'c' on host {host!r}" in str(refused.value)


def on(host, address="tcp://10.0.0.1:1", devices=""):
    return address, {"host": host, "devices": devices}


@pytest.mark.parametrize(
    ("workers", "order"),
    [
        pytest.param({"10": on("h"), "9": on("h"), "0": on("h")}, ["0", "9", "10"], id="numbers"),
        pytest.param({"S-10": on("h"), "S-2": on("h")}, ["S-2", "S-10"], id="numbers in names"),
        pytest.param({"0": on("node10"), "1": on("node2")}, ["1", "0"], id="hosts before names"),
        pytest.param(
            {"a": on("h", devices="1,0"), "b": on("h", devices="0,1")},
            ["b", "a"],
            id="devices before names",
        ),
        pytest.param(
            {"x": on("localhost", "tcp://10.0.0.10:1"), "y": on("localhost", "tcp://10.0.0.9:1")},
            ["y", "x"],
            id="addresses of hosts with one name",
        ),
        pytest.param(
            {"a": ("tcp://10.0.0.2:5", None), "b": on("10.0.0.1")}, ["b", "a"], id="no report"
        ),
    ],
)
def test_ranks_go_by_host_then_device_then_name(workers, order):
    assert rank_order(workers) == order


def test_workers_named_by_their_addresses_keep_their_hosts_and_devices_whatever_their_ports():
    def started(ports):
        places = [
            ("node1", "10.0.0.9", "0"),
            ("node1", "10.0.0.9", "1"),
            ("node2", "10.0.0.1", "0"),
        ]
        addresses = [
            f"tcp://{address}:{port}" for (_, address, _), port in zip(places, ports, strict=True)
        ]
        workers = {
            at: on(host, at, device)
            for at, (host, _, device) in zip(addresses, places, strict=True)
        }
        return [
            (workers[name][1]["host"], workers[name][1]["devices"]) for name in rank_order(workers)
        ]

    assert (
        started([1, 2, 3])
        == started([30, 20, 10])
        == [("node1", "0"), ("node1", "1"), ("node2", "0")]
    )
