"""Workers take devices with fast links by the rank, and divide the CPUs near these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask import collectives
from siirl_dask.context import DeviceKind
from siirl_dask.devices import traits_of
from siirl_dask.devices.accelerator import VisibleDevices
from siirl_dask.devices.cpus import given_cpus, kernel
from siirl_dask.devices.topology import CardPlace, read_topology, slowest_link
from siirl_dask.errors import PeerError
from siirl_dask.worker.hardware import affinity
from siirl_dask.worker.hardware.devices import (
    announcement_of,
    assign,
    exchange,
    find_devices,
    read_visible,
)
from siirl_dask.worker.stop import StopFlag
from tests.devices.hosts import install, links, make_nodes, npu, quads

ROOT = Path(__file__).resolve().parents[2]
CPU, CUDA, NPU = DeviceKind
QUADS = tuple(f"npu{index}" for index in range(8))


@pytest.fixture
def topology(tmp_path):
    """Eight NPUs in two quads that are numbered in turn, each near a node of 16 CPUs."""
    make_nodes(tmp_path, range(16), range(16, 32))
    text = npu(links(8, quads), ["0-15", "16-31"] * 4)
    places = [CardPlace("", index) for index in range(8)]
    return read_topology(places, traits_of(NPU), tmp_path, lambda command: text)


def workers_on(topology, count, given=range(32)):
    """Workers that see all eight NPUs, and may use the CPUs ``given``."""
    visible = VisibleDevices(
        NPU, QUADS, (), topology.order, tuple(near & {*given} for near in topology.near), "host"
    )
    return {str(worker): visible for worker in range(count)}


def shares(visible_to, threads=1, root=Path("/nonexistent")):
    devices = assign(visible_to)
    return {
        name: affinity.share_of_worker(name, visible_to, devices, threads, root)
        for name in visible_to
    }


@pytest.mark.parametrize("size", [2, 4])
def test_groups_of_neighbours_are_in_one_quad(topology, size):
    devices = [*assign(workers_on(topology, 8)).values()]
    assert [device.index for device in devices] == [0, 2, 4, 6, 1, 3, 5, 7]
    for first in range(0, 8, size):
        assert (
            slowest_link(topology.links, [device.index for device in devices[first : first + size]])
            == "HCCS"
        )


def test_without_links_devices_go_as_torch_numbers_them(topology):
    plain = {name: replace(visible, order=()) for name, visible in workers_on(topology, 4).items()}
    assert [device.index for device in assign(plain).values()] == [0, 1, 2, 3]


def test_a_launcher_that_shows_each_worker_another_order_is_heeded(topology):
    whole = workers_on(topology, 8)
    rotated = {
        name: replace(visible, cards=QUADS[int(name) :] + QUADS[: int(name)])
        for name, visible in whole.items()
    }
    assert [device.card for device in assign(rotated).values()] == list(QUADS)


def test_workers_divide_the_cpus_near_their_devices(topology):
    found = shares(workers_on(topology, 8))
    assert [min(found[str(rank)]) for rank in range(8)] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert {len(cpus) for cpus in found.values()} == {4}
    half = shares(workers_on(topology, 2))
    assert half["0"] == set(range(8)), "two workers are on the first quad, and nobody on the other"
    assert half["1"] == set(range(8, 16))


def test_workers_that_share_a_device_divide_its_cpus(topology):
    one = {
        name: replace(visible, cards=QUADS[:1], order=(0,), near=visible.near[:1])
        for name, visible in workers_on(topology, 2).items()
    }
    assert [*shares(one).values()] == [frozenset(range(8)), frozenset(range(8, 16))]


def test_a_restricted_mask_bounds_all_shares(topology):
    found = shares(workers_on(topology, 8, given=range(8, 24)))
    assert all(cpus <= set(range(8, 24)) for cpus in found.values())
    assert found["0"] == set(range(8, 16)), (
        "eight CPUs are too few for four workers, which share them"
    )
    outside = shares(workers_on(topology, 8, given=range(16)))
    assert outside["4"] == frozenset(), "none of its CPUs is near its device: it stays where it is"


def test_masks_that_a_launcher_has_set_stay_apart(topology):
    masks = {"0": range(4), "1": range(4, 8), "2": range(8, 16)}
    placed = {name: workers_on(topology, 1, given)["0"] for name, given in masks.items()}
    assert shares(placed) == {name: frozenset(given) for name, given in masks.items()}


@pytest.fixture
def host_of_32(monkeypatch):
    monkeypatch.setattr(affinity, "given_cpus", lambda: frozenset(range(32)))
    monkeypatch.setattr("dask.system.CPU_COUNT", 32)


def cores(visible_to, neighbours, root=Path("/nonexistent")):
    devices = assign(visible_to)
    return [
        affinity.cores_of_worker(name, visible_to, devices, neighbours, root) for name in visible_to
    ]


@pytest.mark.parametrize("count", [1, 2, 4, 8, 20, 40])
def test_workers_together_are_given_no_more_cores_than_are_near_their_devices(
    topology, host_of_32, count
):
    visible_to = workers_on(topology, count)
    found = cores(visible_to, count)
    assert all(one >= 1 for one in found)
    taken = dict.fromkeys(topology.near, 0)
    for (name, device), one in zip(assign(visible_to).items(), found, strict=True):
        taken[visible_to[name].near[device.index]] += one
    assert all(number <= max(16, count // 2) for number in taken.values())
    assert max(taken.values()) >= 8, "cores are left idle"


def test_two_threads_of_a_core_are_one_core(topology, host_of_32, tmp_path):
    for cpu in range(32):
        folder = tmp_path / f"threads/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(
            f"{cpu % 8},{cpu % 8 + 8}" if cpu < 16 else str(cpu)
        )
    (alone,) = cores(workers_on(topology, 1), 1, tmp_path / "threads")
    assert alone == 8


def test_cores_are_divided_by_the_neighbours_where_nothing_says_which_are_near(
    host_of_32, monkeypatch
):
    visible_to = {"0": VisibleDevices(CUDA, ("a",)), "1": VisibleDevices(CUDA, ("b",))}
    assert cores(visible_to, 4) == [8, 8]
    assert cores(visible_to, 40) == [1, 1]
    monkeypatch.setattr("dask.system.CPU_COUNT", 12)  # as in a container with a quota
    assert cores(visible_to, 4) == [3, 3]


def test_a_worker_is_told_its_cores(host_of_32):
    (device,) = find_devices("w0", ["w0"], None, 1, StopFlag(), cpu=True, neighbours=4).values()
    assert device.cores == 8


def test_workers_of_other_hosts_and_on_cpus_take_nothing_away(topology):
    two = workers_on(topology, 2)
    two["1"] = replace(two["1"], host="another", cards=tuple(f"other/{card}" for card in QUADS))
    two["cpu"] = VisibleDevices()
    found = shares(two)
    assert found["0"] == found["1"] == set(range(16))
    assert found["cpu"] == frozenset()


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4)), min_size=1, max_size=8),
    st.frozensets(st.integers(0, 15)),
    st.integers(1, 3),
)
def test_no_share_leaves_the_given_cpus_and_all_are_fair(workers, given, threads):
    nodes = [given & {*range(8)}, given & {*range(8, 16)}]
    visible_to = {}
    for rank, (host, count) in enumerate(workers):
        cards = tuple(f"{host}{card}" for card in range(count))
        near = tuple(nodes[card % 2] for card in range(count))
        visible_to[str(rank)] = VisibleDevices(CUDA, cards, (), tuple(range(count)), near, host)
    devices = assign(visible_to)
    found = shares(visible_to, threads)
    for name, cpus in found.items():
        near = visible_to[name].near[devices[name].index]
        assert cpus <= near
        assert bool(cpus) == bool(near)


def test_what_is_announced_is_read_back_unchanged(topology):
    (visible,) = workers_on(topology, 1).values()
    assert read_visible("w", announcement_of(visible).encode()) == visible
    assert read_visible("w", announcement_of(VisibleDevices()).encode()) == VisibleDevices()
    bare = VisibleDevices(NPU, QUADS)
    assert read_visible("w", announcement_of(bare).encode()) == bare


@pytest.mark.parametrize(
    "said",
    [
        {"order": [0, 0]}, {"order": [0]}, {"order": [0, 2]}, {"order": [0, True]}, {"order": 1}, {"order": ["a", "b"]},
        {"near": ["0"]}, {"near": ["0", "x"]}, {"near": 3}, {"near": [0, 1]}, {"near": ["0-99999", "0"]},
        {"host": 3}, {"host": "h" * 201},
    ],
)  # fmt: skip
def test_a_peer_that_announces_anything_else_is_named(said):
    whole = {
        "kind": "npu",
        "cards": ["a", "b"],
        "memory": [],
        "order": [1, 0],
        "near": ["0", "1"],
        "host": "h",
    }
    assert read_visible("w", json.dumps(whole).encode()).order == (1, 0)
    with pytest.raises(PeerError, match="worker 'w' announced"):
        read_visible("w", json.dumps(whole | said).encode())


def test_all_workers_compute_the_same_places_through_the_store(topology):
    visible_to = workers_on(topology, 4)
    hosted, port = collectives.host_store("127.0.0.1", 20)

    def meet(worker):
        store = hosted if worker == "0" else collectives.join_store("127.0.0.1", port, 20)
        found = exchange(worker, [*visible_to], visible_to[worker], store, 20, StopFlag())
        return assign(found), shares(found)

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(meet, visible_to))
    assert answers == [(assign(visible_to), shares(visible_to))] * 4


def test_a_process_on_cpus_is_left_as_it_is():
    assert affinity.on_host(VisibleDevices()) == VisibleDevices()
    assert kernel() == kernel() != ""


WORKER = """
import json, os
from siirl_dask.devices.cpus import CpuBinding
from siirl_dask.worker.hardware.devices import find_devices
from siirl_dask.worker.stop import StopFlag

binding = CpuBinding()
device = find_devices("w0", ["w0"], None, 1, StopFlag(), binding=binding)["w0"]
bound = sorted(os.sched_getaffinity(0))
binding.undo()
off = find_devices("w0", ["w0"], None, 1, StopFlag())["w0"]
print(json.dumps([device.torch_name, sorted(device.cpus), bound, sorted(os.sched_getaffinity(0)), sorted(off.cpus)]))
"""


CHILDREN = """
import asyncio, os, sys
from types import SimpleNamespace
from siirl_dask.devices.cpus import CpuBinding, given_cpus
from siirl_dask.rewards.process_pool import Pool
from siirl_dask.rollout.endpoint.programs import Program

code = "import os; print(len(os.sched_getaffinity(0)))"
CpuBinding().bind(frozenset({max(given_cpus())}))
pool = Pool(lambda prompt: len(__import__("os").sched_getaffinity(0)), 1)
with pool.child() as child:
    print(child.call({"prompt": ""}, 60)[0])
pool.close()
client = SimpleNamespace(base_url="", api_key="", model="", seed=0)
print(asyncio.run(Program([sys.executable, "-c", "import sys; sys.stdin.read(); " + code])(client, {})))
print(len(os.sched_getaffinity(0)))
"""


@pytest.mark.skipif(len(given_cpus()) < 2, reason="needs two CPUs to be bound to one of them")
def test_rewards_and_agents_in_processes_have_all_cpus_of_a_worker_that_is_bound():
    done = subprocess.run([sys.executable, "-c", CHILDREN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    here = str(len(given_cpus()))
    assert done.stdout.split() == [here, here, "1"]


@pytest.mark.skipif(len(given_cpus()) < 2, reason="needs two CPUs to be bound to one of them")
def test_a_worker_on_an_npu_is_bound_to_the_cpus_that_npu_smi_names(tmp_path):
    """On an NPU that is stood in for, whose NUMA node the system here does not tell: the
    program's column counts.
    """
    one = max(given_cpus())
    text = npu(links(2, lambda one, two: "HCCS"), [f"{one},8000", "0"])
    (tmp_path / "topo").write_text(text)
    install(tmp_path / "bin", "npu-smi", f"cat {tmp_path / 'topo'}")
    path = os.pathsep.join([str(ROOT / "tests" / "fake_npu"), str(ROOT), str(ROOT / "storage")])
    environment = {**os.environ, "PYTHONPATH": path, "FAKE_NPU_COUNT": "2"}
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", WORKER], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == ["npu:0", [one], [one], sorted(given_cpus()), []]
