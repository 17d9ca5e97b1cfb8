"""``plan`` and ``doctor`` tell a host's topology, on hosts that are made up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from siirl_dask.config import Affinity, ClusterConfig, DevicePreference
from siirl_dask.context import DeviceKind
from siirl_dask.devices import accelerator, traits_of
from siirl_dask.devices.accelerator import VisibleDevices
from siirl_dask.devices.cpus import given_cpus, show_cpus
from siirl_dask.devices.topology import CardPlace, read_topology
from siirl_dask.driver.doctor import DoctorState
from siirl_dask.driver.doctor.topology import check_topology, judge_topology
from siirl_dask.estimates import worker_devices
from siirl_dask.estimates.worker_devices import describe_links, find_worker_devices
from tests.devices.hosts import install, links, make_nodes, npu, quads
from tests.settings import digits_overrides

ROOT = Path(__file__).resolve().parents[2]
NPU = DeviceKind.NPU
VISIBLE = VisibleDevices(NPU, tuple(f"npu{index}" for index in range(8)))


def topology_of(cells, root, near=None):
    numbers = [CardPlace("", index) for index in range(len(cells))]
    return read_topology(numbers, traits_of(NPU), root, lambda command: npu(cells, near))


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (links(8, quads), "HCCS within npu:0,2,4,6 and within npu:1,3,5,7; SYS between these"),
        (links(4, lambda one, two: "HCCS"), "HCCS between each two of npu:0,1,2,3"),
        (links(1, quads), "npu:0 is alone"),
        (links(2, lambda one, two: "NA"), "not known between each two of npu:0,1"),
        (
            links(
                3, lambda one, two: "PIX" if one + two == 1 else "PHB" if one + two == 2 else "SYS"
            ),
            "PIX within npu:0,1 and within npu:2; PHB, SYS between these",
        ),
    ],
)
def test_links_are_told_in_a_line(cells, said, tmp_path):
    assert describe_links(topology_of(cells, tmp_path), NPU) == said


def test_the_doctor_tells_nodes_and_leaves_workers_on_cpus_alone(monkeypatch):
    monkeypatch.setattr(accelerator, "visible_devices", VisibleDevices)
    (finding,) = check_topology(ClusterConfig())
    assert (finding.part, finding.state) == ("numa", DoctorState.OK)
    assert finding.text.endswith(f"this process may use {show_cpus(given_cpus())}")


def test_the_doctor_tells_each_workers_cpus_and_what_it_could_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "siirl_dask.worker.hardware.affinity.given_cpus", lambda: frozenset(range(12))
    )
    make_nodes(tmp_path, range(8), range(8, 16))
    found = topology_of(links(8, quads), tmp_path, ["0-7", "8-15"] * 4)
    for_run = judge_topology(VISIBLE, found, ClusterConfig(workers=5))
    assert [each.text for each in for_run] == [
        "HCCS within npu:0,2,4,6 and within npu:1,3,5,7; SYS between these",
        "workers of a run here: 0 on npu:0 CPUs 0-7, 1 on npu:2 CPUs 0-7, 2 on npu:4 CPUs 0-7, 3 "
        "on npu:6 CPUs 0-7, 4 on npu:1 CPUs 8-11",
    ]
    off = judge_topology(VISIBLE, found, ClusterConfig(affinity=Affinity.none))
    assert off[-1].text == "cluster.affinity=none: workers are bound to no CPUs"
    broken = read_topology([CardPlace("", 0)], traits_of(NPU), tmp_path, lambda command: "what?")
    findings = judge_topology(VisibleDevices(NPU, ("npu0",)), broken, ClusterConfig(workers=1))
    assert [each.state for each in findings] == [DoctorState.OK, DoctorState.NOTE, DoctorState.OK]
    assert (
        "`npu-smi info -t topo` is left out: no line begins with the name of a card"
        in findings[1].text
    )


@pytest.mark.parametrize(
    "cluster",
    [
        ClusterConfig(),
        ClusterConfig(address="tcp://10.0.0.1:8786"),
        ClusterConfig(spec="slurm.yaml"),
        ClusterConfig(device=DevicePreference.cpu),
        ClusterConfig(affinity=Affinity.none),
    ],
    ids=[
        "a machine without accelerators",
        "elsewhere",
        "a cluster to be started",
        "on CPUs",
        "not asked for",
    ],
)
def test_places_are_told_only_where_workers_start_here_on_accelerators(cluster, monkeypatch):
    there = cluster == ClusterConfig()
    look = VisibleDevices if there else lambda: pytest.fail("nothing is to be looked at")
    monkeypatch.setattr(worker_devices, "visible_devices", look)
    assert find_worker_devices(cluster, ["0"]) is None


def on_npus(tmp_path, *command):
    """Run a command where four NPUs are stood in for, in two pairs that are numbered in turn."""
    near = str(min(given_cpus()))
    cells = links(4, quads)
    (tmp_path / "topo").write_text(npu(cells, [near] * 4))
    install(tmp_path / "bin", "npu-smi", f"cat {tmp_path / 'topo'}")
    path = os.pathsep.join([str(ROOT / "tests" / "fake_npu"), str(ROOT), str(ROOT / "storage")])
    environment = {**os.environ, "PYTHONPATH": path, "FAKE_NPU_COUNT": "4"}
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-m", "siirl_dask.cli", *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_plan_shows_devices_cpus_and_the_links_of_groups(digits_task, tmp_path):
    given = [
        *digits_overrides(digits_task, tmp_path / "run"),
        "cluster.workers=4",
        "trainer.backend=fsdp",
    ]
    placed = ["cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3]}"]
    command = ["plan", "configs/quickstart.yaml", *given, *placed]
    told = json.loads(on_npus(tmp_path, *command, "--format=json"))["topology"]
    assert [one["device"] for one in told["workers"].values()] == [
        "npu:0",
        "npu:2",
        "npu:1",
        "npu:3",
    ]
    assert told["links"][0] == ["X", "SYS", "HCCS", "SYS"]
    (group,) = told["groups"]
    assert (group["role"], group["size"], group["slowest"]) == ("policy", 2, "HCCS")
    assert not told["faults"]
    text = on_npus(tmp_path, *command).partition("== topology ==")[2]
    assert "Links: HCCS within npu:0,2 and within npu:1,3; SYS between these" in text
    assert "role 'policy', " in text
    assert "=2: HCCS" in text
    elsewhere = on_npus(tmp_path, *command, "--hosts=2x2")
    assert "== topology ==" not in elsewhere, "other hosts are not this one"
