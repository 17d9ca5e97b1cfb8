"""Devices, process groups and roles: each worker takes a device, each role a backend, and
engines sleep meanwhile.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from threading import Timer
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask import collectives
from siirl_dask.config import WeightSync
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices.accelerator import VisibleDevices, names_on_host, visible_devices
from siirl_dask.errors import Aborted, ConfigError, PeerError
from siirl_dask.planner import Role
from siirl_dask.testing.ranks import run_ranks
from siirl_dask.worker.groups import process_groups as groups
from siirl_dask.worker.hardware.devices import (
    announcement_of,
    assign,
    exchange,
    find_devices,
    read_visible,
)
from siirl_dask.worker.roles.role_state import build_roles
from siirl_dask.worker.stop import StopFlag

CPU, CUDA, NPU = DeviceKind


@st.composite
def runs(draw):
    """{worker: VisibleDevices}: each sees all cards of its host, from any of them on, or one, or
    none.
    """
    hosts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    visible_to = {}
    for worker in draw(st.permutations(range(draw(st.integers(1, 10))))):
        host = draw(st.integers(0, len(hosts) - 1))
        cards = [f"{host}/{card}" for card in range(hosts[host])]
        first = draw(st.integers(0, max(0, len(cards) - 1)))
        rotated = cards[first:] + cards[:first]
        seen = rotated[:1] if draw(st.booleans()) else rotated
        memory = tuple(10**9 * (1 + len(card)) for card in seen) if draw(st.booleans()) else ()
        visible_to[str(worker)] = VisibleDevices(CUDA if seen else CPU, tuple(seen), memory)
    return visible_to


@given(visible_to=runs())
def test_no_card_is_shared_while_a_visible_one_is_free(visible_to):
    devices = assign(visible_to)
    takers = [device.card for device in devices.values() if device.card]
    assert list(devices) == list(visible_to)
    for worker, device in devices.items():
        cards = visible_to[worker].cards
        assert device.worker == worker
        assert (device.kind, device.card) == ((CUDA, cards[device.index]) if cards else (CPU, ""))
        assert device.shared_by == max(1, takers.count(device.card))
        assert device.shared_by == 1 or all(card in takers for card in cards)


@given(visible_to=runs())
def test_cards_visible_to_a_whole_host_are_shared_evenly(visible_to):
    whole = {worker: visible for worker, visible in visible_to.items() if len(visible.cards) != 1}
    devices = assign(whole)
    for worker, visible in whole.items():
        takers = [sum(device.card == card for device in devices.values()) for card in visible.cards]
        assert not takers or max(takers) - min(takers) <= 1, worker


def test_workers_on_one_host_take_one_card_each_in_order():
    cards = ("a", "b", "c")
    assert [
        device.index
        for device in assign({name: VisibleDevices(CUDA, cards) for name in "xyz"}).values()
    ] == [
        0,
        1,
        2,
    ]
    rotated = {name: VisibleDevices(CUDA, cards[at:] + cards[:at]) for at, name in enumerate("xyz")}
    assert [(device.index, device.card) for device in assign(rotated).values()] == [
        (0, "a"),
        (0, "b"),
        (0, "c"),
    ]


@given(visible_to=runs())
def test_announced_devices_are_read_back_unchanged(visible_to):
    for visible in visible_to.values():
        raw = json.dumps(
            {"kind": str(visible.kind), "cards": visible.cards, "memory": visible.memory}
        ).encode()
        assert read_visible("w", raw) == visible


@pytest.mark.parametrize(
    "said",
    [
        b"\xff", b"[]", b"{", b"[" * 60_000, b" " * 70_000, b'{"kind": "cuda"}', b'{"kind": "tpu", "cards": ["a"]}',
        b'{"kind": "cuda", "cards": '
        b'"ab"}', b'{"kind": "cuda", "cards": []}', b'{"kind": "cpu", "cards": ["a"]}',
        b'{"kind": "cuda", "cards": ["a", '
        b'"a"]}', b'{"kind": "cuda", "cards": [1]}', b'{"kind": "cuda", "cards": [""]}',
        json.dumps({"kind": "cuda", "cards": ["a" * 201], "memory": []}).encode(),
        json.dumps({"kind": "cuda", "cards": [str(card) for card in range(257)], "memory": []}).encode(),
        *(
            json.dumps({"kind": "cuda", "cards": ["a"], "memory": memory}).encode()
            for memory in ("8GB", [1, 2], [0], [-1], [True], [1.5], [2**60], {"a": 1}, None)
        ),
        *(
            json.dumps({"kind": "cuda", "cards": ["a"], "memory": [], "pci": pci}).encode()
            for pci in (["h/1", "h/2"], [1], [""], ["a" * 201], 7)
        ),
    ],
    ids=lambda said: repr(said[:70]),
)  # fmt: skip
def test_a_worker_that_says_anything_else_is_named(said):
    with pytest.raises(PeerError, match="worker 'w3' announced"):
        read_visible("w3", said)


def test_all_workers_compute_the_same_devices_through_the_store():
    workers = [f"w{rank}" for rank in range(4)]
    visible_to = {
        worker: VisibleDevices(CUDA, ("a", "b", "c")[: 1 + rank % 3])
        for rank, worker in enumerate(workers)
    }
    hosted, port = collectives.host_store("127.0.0.1", 20)

    def meet(worker):
        store = hosted if worker == workers[0] else collectives.join_store("127.0.0.1", port, 20)
        return assign(exchange(worker, workers, visible_to[worker], store, 20, StopFlag()))

    with ThreadPoolExecutor(len(workers)) as threads:
        answers = list(threads.map(meet, workers))
    assert answers == [assign(visible_to)] * len(workers)
    assert list(answers[0]) == workers


def test_a_worker_that_announces_nothing_is_named():
    store, _ = collectives.host_store("127.0.0.1", 20)
    with pytest.raises(
        PeerError, match=r"workers \['w1', 'w2'\] did not announce their devices within 0.2 s"
    ):
        exchange("w0", ["w0", "w1", "w2"], VisibleDevices(), store, 0.2, StopFlag())
    stop = StopFlag()
    stop.set("another failed")
    with pytest.raises(Aborted, match="another failed"):
        exchange("w1", ["w0", "w1", "w2"], VisibleDevices(), store, 20, stop)


def test_a_worker_that_is_alone_needs_no_store():
    assert find_devices("w0", ["w0"], None, 1, StopFlag()) == assign({"w0": visible_devices()})


def test_a_worker_computes_on_the_card_that_it_takes(monkeypatch):
    uuids, chosen = ["uuid-2", "uuid-3", "uuid-1"], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(uuids))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(uuid=uuids[index], total_memory=8 * 10**9 + index),
    )
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert visible_devices() == VisibleDevices(
        CUDA, tuple(uuids), tuple(8 * 10**9 + index for index in range(3))
    )
    store, _ = collectives.host_store("127.0.0.1", 20)
    # the other worker's say, of rank 0
    exchange("w1", ["w1"], VisibleDevices(CUDA, ("uuid-2",)), store, 1, StopFlag())
    devices = find_devices("w0", ["w1", "w0"], store, 20, StopFlag())
    assert devices["w0"] == Device("w0", CUDA, 1, "uuid-3")
    assert devices["w0"].torch_name == "cuda:1"
    assert devices["w0"].memory == 8 * 10**9 + 1
    assert chosen == [1]
    assert find_devices("w0", ["w0"], None, 1, StopFlag(), cpu=True) == {"w0": Device("w0")}
    assert chosen == [1], "cluster.device=cpu takes no card"


def test_npus_are_named_by_host_and_index():
    assert (
        names_on_host(NPU, "host", 2, None)
        == names_on_host(NPU, "host", 2, "")
        == ("host/npu0", "host/npu1")
    )
    assert names_on_host(NPU, "host", 2, "5, 4") == ("host/npu5", "host/npu4")
    assert names_on_host(NPU, "host", 2, "0-1") == ("host/npu0", "host/npu1")


def on(kind, *cards):
    return [Device(f"w{at}", kind, 0, card, cards.count(card)) for at, card in enumerate(cards)]


@pytest.mark.parametrize(
    ("devices", "backend"),
    [
        (on(CPU, "", ""), "gloo"),
        (on(CUDA, "a", "b", "c"), "nccl"),
        (on(CUDA, "a"), "nccl"),
        (on(CUDA, "a", "b", "a"), "gloo"),
        ([*on(CUDA, "a"), *on(CPU, "")], "gloo"),
        (on(NPU, "h/npu0", "h/npu1"), "hccl"),
        (on(NPU, "h/npu0"), "hccl"),
    ],
)
def test_workers_that_share_a_device_use_gloo(devices, backend):
    assert groups.backend_of(devices) == groups.role_backend("policy", devices) == backend


def taken_from(monkeypatch, hosts):
    """Devices of a worker for each ``(kernel, uuid, PCI bus)``, as they announce and take them."""
    visible_to = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for rank, (host, uuid, bus) in enumerate(hosts):
        address = {"pci_domain_id": 0, "pci_bus_id": bus, "pci_device_id": 0}
        found = SimpleNamespace(uuid=uuid, total_memory=10**10, **address)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, found=found: found)
        monkeypatch.setattr("siirl_dask.devices.accelerator.kernel", lambda host=host: host)
        visible_to[f"w{rank}"] = read_visible(
            f"w{rank}", announcement_of(visible_devices()).encode()
        )
    return [*assign(visible_to).values()]


@pytest.mark.parametrize(
    ("found", "backend"),
    [
        ([("host", "MIG-a", 0x3B), ("host", "MIG-b", 0x3B)], "gloo"),
        ([("host", "MIG-a", 0x3B), ("host", "MIG-b", 0x5E)], "nccl"),
        ([("host", "GPU-a", 0x3B), ("host", "GPU-b", 0x5E)], "nccl"),
        ([("host", "GPU-a", 0x3B), ("another", "GPU-b", 0x3B)], "nccl"),
        ([("host", "GPU-a", 0x3B), ("host", "GPU-a", 0x3B)], "gloo"),
    ],
)
def test_slices_of_one_gpu_get_no_nccl_and_gpus_at_one_address_of_two_hosts_do(
    monkeypatch, found, backend
):
    devices = taken_from(monkeypatch, found)
    assert groups.backend_of(devices) == backend
    slices = len({uuid for _, uuid, _ in found}) == 2
    assert all(device.shared_by == (1 if slices else 2) for device in devices), (
        "a slice has memory of its own"
    )


@pytest.mark.parametrize(
    "devices", [on(NPU, "h/npu0", "h/npu0"), [*on(NPU, "h/npu0"), *on(CPU, "")]]
)
def test_npus_that_nothing_can_join_are_refused_by_name(devices):
    assert groups.backend_of(devices) == "gloo"  # of the world, over which nothing goes
    with pytest.raises(
        ConfigError, match=r"role 'policy' has workers 'w0' on h/npu0.*cluster\.workers.*placement"
    ):
        groups.role_backend("policy", devices)


@pytest.mark.parametrize(
    ("devices", "auto"),
    [
        (on(CUDA, "a", "b", "c"), True),
        (on(NPU, "h/npu0", "h/npu1"), True),
        (on(CUDA, "a", "a"), False),
        (on(CUDA, "a", "b", "a"), False),
        (on(CPU, "", ""), False),
        ([*on(CUDA, "a"), *on(CPU, "")], False),
    ],
)
def test_weights_are_broadcast_between_accelerators_or_on_demand(devices, auto):
    chosen = {way: groups.uses_broadcast(way, devices) for way in WeightSync}
    assert chosen == {WeightSync.auto: auto, WeightSync.rows: False, WeightSync.broadcast: True}


def test_a_broadcast_that_must_be_is_refused_where_npus_are_shared():
    shared = on(NPU, "h/npu0", "h/npu0")
    assert not groups.uses_broadcast(WeightSync.auto, shared)
    with pytest.raises(
        ConfigError, match=r"rollout\.weight_sync=broadcast between workers 'w0' on h/npu0.*=auto"
    ):
        groups.uses_broadcast(WeightSync.broadcast, shared)


def join_on_one_card(rank):
    """Backends of the world and of a role of both workers, two sums over that, and what the
    second one broadcasts.
    """
    hosted, port = collectives.host_store("127.0.0.1", 60) if rank.rank == 0 else (None, 0)
    ports = torch.tensor([port])
    dist.broadcast(ports, 0)
    store = hosted or collectives.join_store("127.0.0.1", int(ports), 60)
    dist.destroy_process_group()
    devices = {device.worker: device for device in on(CUDA, "a", "a")}
    roles = {"engine": ["w0", "w1"], "turned": ["w1", "w0"], "policy": ["w1"]}
    ranks = groups.join(store, "run", f"w{rank.rank}", devices, roles, "127.0.0.1", 60)
    for role, own in ranks.items():  # whatever order a placement has
        assert own.rank == roles[role].index(f"w{rank.rank}")
        assert own.group is None or dist.get_rank(own.group) == own.rank
        assert dist.get_rank(own.side_group) == own.rank
    sums = [groups.RolePeers(ranks[role], StopFlag()).all_sum([0.5, rank.rank]) for role in ranks]
    cpus = {device.worker: device for device in on(CPU, "", "")}
    both, one = (
        groups.broadcast_group(f"w{rank.rank}", cpus, some, 60) for some in (["w1", "w0"], ["w1"])
    )
    brought = torch.tensor([rank.rank, 7])
    both.broadcast(brought, 0).wait()
    joined = [brought.tolist(), one is not None]
    return [dist.get_backend(), dist.get_backend(ranks["engine"].group), list(ranks), sums, joined]


def test_workers_that_share_a_card_join_and_add_up(tmp_path):
    first, second = run_ranks(2, join_on_one_card, tmp_path)
    both = [[1.0, 1.0]] * 2
    assert first == ["gloo", "gloo", ["engine", "turned"], both, [[1, 7], False]]
    assert second == [
        "gloo",
        "gloo",
        ["engine", "turned", "policy"],
        [*both, [0.5, 1.0]],
        [[1, 7], True],
    ]


def sum_without_the_peer(rank):
    """Rank 0 sums, is told to stop and sums again in another group; rank 1 takes part in the
    second sum alone.
    """
    left, kept = (collectives.new_group([0, 1], "gloo", 60) for _ in range(2))
    stop, outcome = StopFlag(), ""
    if rank.rank == 0:
        Timer(0.1, stop.set, ["a node failed"]).start()
        try:
            groups.RolePeers(replace(rank, cpu_group=left), stop).all_sum([1.0])
        except Aborted as error:
            outcome = str(error)
    return [outcome, groups.RolePeers(replace(rank, cpu_group=kept), StopFlag()).all_sum([1.0])]


def test_a_sum_whose_peer_never_comes_ends_when_the_run_does(tmp_path):
    assert run_ranks(2, sum_without_the_peer, tmp_path) == [["a node failed", [2.0]], ["", [2.0]]]


def leave_before_the_peer(rank):
    """Rank 0 gives up a sum, or begins a broadcast, for which rank 1 never comes, and leaves; rank 1
    only then.
    """
    hosted, port = collectives.host_store("127.0.0.1", 60) if rank.rank == 0 else (None, 0)
    ports = torch.tensor([port])
    dist.broadcast(ports, 0)
    store = hosted or collectives.join_store("127.0.0.1", int(ports), 60)
    dist.destroy_process_group()
    worker, roles = f"w{rank.rank}", {"policy": ["w0", "w1"]}
    devices = {device.worker: device for device in on(CPU, "", "")}
    ranks = groups.join(store, "run", worker, devices, roles, "127.0.0.1", 60)
    group = groups.broadcast_group(worker, devices, ["w1", "w0"], 60)
    if rank.rank == 0:
        stop = StopFlag()
        stop.set("a node failed")
        with suppress(Aborted):
            groups.RolePeers(ranks["policy"], stop).all_sum([1.0])
        group.broadcast(torch.zeros(1), 0)
    else:
        store.wait(["left"], timedelta(seconds=50))
    del ranks, group
    groups.leave(abort=True)
    store.set("left", "")
    dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=2)
    return dist.get_world_size()


def test_a_worker_of_a_stopped_run_leaves_though_a_peer_has_not_come_to_what_it_gave_up(tmp_path):
    """gloo waits for its threads, which wait for the peer: it may be in a task for long."""
    assert run_ranks(2, leave_before_the_peer, tmp_path) == [2, 2]


@dataclass
class Sleeper:
    """A role's object that records when it is sent to sleep."""

    name: str
    log: list[str]

    def sleep(self):
        self.log.append(f"{self.name} sleeps")


def build_sleeper(device, rank, *, name, log):
    build_other(device, rank, name=name, log=log)
    return Sleeper(name, log)


def build_other(device, rank, *, name, log):
    log.append(f"{name} built on {device.index} as {rank.rank}")


def built(kind):
    log = []
    builds = {
        "engine": build_sleeper,
        "elsewhere": build_sleeper,
        "policy": build_other,
        "last": build_sleeper,
    }
    roles = [Role(name, partial(build, name=name, log=log)) for name, build in builds.items()]
    ranks = {"engine": Rank(1, 2), "policy": Rank(), "last": Rank()}
    return list(build_roles(roles, Device("w", kind, 2), ranks)), log


def test_an_engine_sleeps_while_the_next_roles_are_built():
    names, log = built(CUDA)
    assert names == ["engine", "policy", "last"]
    assert log == [
        "engine built on 2 as 1",
        "engine sleeps",
        "policy built on 2 as 0",
        "last built on 2 as 0",
    ]


def test_nothing_sleeps_where_roles_share_the_hosts_memory():
    assert not any("sleeps" in line for line in built(CPU)[1])
