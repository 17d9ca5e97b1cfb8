"""Runs on clusters of several hosts of the lab, as a user starts them."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from siirl_dask.config.file import shipped
from siirl_dask.testing.hosts import DaskCluster, Host, Lab, Links, why_no_lab
from siirl_dask.worker.process.fork_server import START_METHOD
from tests.conftest import digits_overrides
from tests.forked_programs import ForkedProgram, forked_on

REASON = why_no_lab()
APART = "cluster.placement={rollout: [0], reward: [0], policy: [1, 2]}"
"""Placement of the digits task on three workers: what one generates, two others learn."""


def pytest_collection_modifyitems(items):
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in here if REASON else ():
        item.add_marker(pytest.mark.skip(reason=REASON))


def forked_cluster(scheduler, workers, folder, *, environment=None, **options):
    """A DaskCluster whose processes are forked, and the workers of its nannies as well."""
    return DaskCluster(
        scheduler,
        workers,
        folder,
        environment={
            "DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD": START_METHOD,
            **(environment or {}),
        },
        start=forked_on(folder),
        **options,
    )


@dataclass
class Driver:
    """``siirl-dask run`` on a host of the lab."""

    process: ForkedProgram
    url: Path
    host: Host

    def steps(self):
        log = self.url / "metrics.jsonl"
        return log.read_text().count('"phase": "train"') if log.exists() else 0

    def wait_for_steps(self, count, timeout=300):
        deadline = time.monotonic() + timeout
        while self.steps() < count:
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, f"{self.steps()} steps after {timeout} s"
            try:
                self.process.wait(0.05)
            except subprocess.TimeoutExpired:
                continue

    def end(self, timeout=120):
        """Return what it printed, and the seconds until it ended."""
        began = time.monotonic()
        out, _ = self.process.communicate(timeout=timeout)
        return out, time.monotonic() - began

    def succeeds(self, timeout=300):
        out, _ = self.end(timeout)
        assert self.process.returncode == 0, out
        return json.loads((self.url / "summary.json").read_text())


@pytest.fixture
def digits_on(digits_task, tmp_path):
    """Start the digits task on a cluster of the lab, from one of its hosts."""

    def start(cluster, host, *overrides, name="run", config_file=None):
        url = tmp_path / name
        given = [
            *digits_overrides(digits_task, url),
            f"cluster.address={cluster.address}",
            "cluster.workers=3",
            APART,
        ]
        command = (
            "-m",
            "siirl_dask.cli",
            "run",
            config_file or shipped("quickstart.yaml"),
            *given,
            *overrides,
        )
        return Driver(cluster.run(host, *command), url, host)

    return start


@pytest.fixture
def cluster_of_three(tmp_path):
    """Make a lab of three hosts, with a scheduler on the first and a worker on each; options are
    those of Lab.
    """
    labs = []

    def make(links=None, ipv6=False, environment=None, count=3, **options):
        lab = Lab(count, links=links or Links(), **options)
        labs.append(lab)
        return lab, forked_cluster(
            lab.hosts[0], lab.hosts[:3], tmp_path, ipv6=ipv6, environment=environment
        )

    yield make
    for lab in labs:
        lab.close()
