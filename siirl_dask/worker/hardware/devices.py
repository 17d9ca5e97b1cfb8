"""Assigns each worker of a run the device that it computes on.

A worker's rank does not determine the devices visible to it: hosts differ, and a launcher may show
each worker all devices of its host in another order, or only one. So each worker announces its
visible devices through the run's store, and all of them compute the same assignment from the
announcements.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from siirl_dask.context import Device
from siirl_dask.devices import DeviceKind, accelerator
from siirl_dask.devices.accelerator import VisibleDevices, visible_devices
from siirl_dask.devices.cpus import CpuBinding, read_cpus, show_cpus
from siirl_dask.errors import PeerError
from siirl_dask.worker.hardware.affinity import cores_of_worker, on_host, share_of_worker
from siirl_dask.worker.stop import StopFlag

logger = logging.getLogger("siirl_dask.worker")
_POLL_EVERY = 0.1  # seconds between checks whether all workers have announced their devices
_MAX_BYTES = 2**18  # limits on a peer's announcement
_MAX_DEVICES = 256
_MAX_NAME = 200
_MAX_MEMORY = 2**50  # bytes of an accelerator


class KeyValueStore(Protocol):
    """The part of torch.distributed's stores that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


def find_devices(
    worker: str,
    workers: Sequence[str],
    store: KeyValueStore | None,
    timeout: float,
    stop: StopFlag,
    *,
    cpu: bool = False,
    binding: CpuBinding | None = None,
    threads: int = 1,
    neighbours: int = 1,
) -> dict[str, Device]:
    """Return every worker's device, in the order of ``workers``, and make ``worker``'s own the
    current one of torch.

    ``worker`` is the caller. With ``cpu`` all compute on their CPUs, whatever they see. ``binding``
    binds the process to CPUs near its device; None: neither that, nor are devices ordered by their
    links. ``threads`` are those of torch, ``neighbours`` the number of workers at this one's
    address. ``store`` may be None for a single worker. PeerError when another worker has not
    announced its devices within ``timeout`` seconds.
    """
    visible = VisibleDevices() if cpu else visible_devices()
    if binding is not None:
        visible = on_host(visible)
    visible_to = {worker: visible}
    if store is not None:
        visible_to = exchange(worker, workers, visible, store=store, timeout=timeout, stop=stop)
    devices = assign(visible_to)
    bind(devices[worker])
    cores = cores_of_worker(worker, visible_to, devices, neighbours)
    own = replace(devices[worker], cores=cores)
    cpus: frozenset[int] = frozenset()
    if binding is not None:
        cpus = share_of_worker(worker, visible_to, devices, threads)
    if binding is not None and cpus:
        binding.bind(cpus)
        own = replace(own, cpus=cpus)
        logger.info("worker %r runs on CPUs %s, near %s", worker, show_cpus(cpus), own.torch_name)
    devices[worker] = own
    if own.shared_by > 1:
        others = own.shared_by - 1
        logger.warning(
            "worker %r shares %s (%s) with %d others", worker, own.torch_name, own.card, others
        )
    return devices


def bind(device: Device) -> None:
    """Make ``device`` torch's current one in this thread."""
    accelerator.bind(device.kind, device.index)


def assign(visible_to: Mapping[str, VisibleDevices]) -> dict[str, Device]:
    """Return each worker's device: the first visible one that the fewest workers use so far.

    Workers with the fewest visible devices are assigned first, others in the order of the run.
    Where every worker sees all devices of its host, in any order, or one of them, no device is
    shared while another one visible to a sharer is free. Workers that see the same devices in the
    same order are assigned by the devices' links; a launcher that shows each worker the devices in
    another order has decided which one it is to use.
    """
    users: Counter[str] = Counter()
    index_of: dict[str, int] = {}
    same_view = Counter(visible.cards for visible in visible_to.values())
    for worker in sorted(visible_to, key=lambda name: len(visible_to[name].cards)):
        visible = visible_to[worker]
        cards = visible.cards
        if cards:
            order = visible.order if same_view[cards] > 1 and visible.order else range(len(cards))
            index = min(order, key=lambda index: users[cards[index]])
            index_of[worker] = index
            users[cards[index]] += 1
    return {
        worker: _device(worker, visible, index_of.get(worker), users)
        for worker, visible in visible_to.items()
    }


def _device(
    worker: str,
    visible: VisibleDevices,
    index: int | None,
    users: Mapping[str, int],
) -> Device:
    if index is None:
        return Device(worker)
    card = visible.cards[index]
    return Device(
        worker,
        visible.kind,
        index,
        card,
        shared_by=users[card],
        memory=visible.memory[index] if visible.memory else 0,
        pci=visible.pci[index] if visible.pci else "",
    )


def exchange(
    worker: str,
    workers: Sequence[str],
    visible: VisibleDevices,
    store: KeyValueStore,
    timeout: float,
    stop: StopFlag,
) -> dict[str, VisibleDevices]:
    """Announce ``visible`` and return the visible devices of all ``workers``, in their order.

    All of them call this once with the same ``store``. PeerError after ``timeout`` seconds, Aborted
    when the flag is set meanwhile.
    """
    keys = {name: f"visible/{rank}" for rank, name in enumerate(workers)}
    store.set(keys[worker], announcement_of(visible))
    announced = store.add("announced", 1)
    deadline = time.monotonic() + timeout
    while announced < len(workers):
        if time.monotonic() > deadline:
            missing = [name for name, key in keys.items() if not store.check([key])]
            raise PeerError(
                f"workers {missing} did not announce their devices within {timeout:g} s"
            )
        stop.wait(_POLL_EVERY)
        announced = store.add("announced", 0)
    raw = store.multi_get(list(keys.values()))
    return {name: read_visible(name, text) for name, text in zip(keys, raw, strict=True)}


def announcement_of(visible: VisibleDevices) -> str:
    """Return the message in which a worker announces its devices; ``read_visible`` reads it."""
    announcement: dict[str, Any] = {
        "kind": str(visible.kind),
        "cards": visible.cards,
        "memory": visible.memory,
        "pci": visible.pci,
    }
    if visible.host:
        announcement["order"] = visible.order
        announcement["near"] = [show_cpus(cpus) for cpus in visible.near]
        announcement["host"] = visible.host
    return json.dumps(announcement)


def read_visible(worker: str, raw: bytes) -> VisibleDevices:
    """Return the devices that ``worker`` announced. PeerError for a malformed or an oversized
    announcement.
    """
    malformed = PeerError(
        f"worker {worker!r} announced {raw[:200]!r}: expected a kind and names of devices"
    )
    if len(raw) > _MAX_BYTES:
        raise malformed
    try:
        announcement: Any = json.loads(raw)
        kind = DeviceKind(announcement["kind"])
        cards = announcement["cards"]
        memory = announcement["memory"]
        order = tuple(announcement.get("order", ()))
        near = tuple(map(read_cpus, announcement.get("near", ())))
        host = announcement.get("host", "")
        pci = tuple(announcement.get("pci", ()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise malformed from None
    if (
        not isinstance(cards, list)
        or len(cards) > _MAX_DEVICES
        or not all(isinstance(card, str) and 0 < len(card) <= _MAX_NAME for card in cards)
        or (kind is DeviceKind.CPU) != (not cards)
        or len(set(cards)) != len(cards)
        or not isinstance(memory, list)
        or len(memory) not in (0, len(cards))
        or not all(type(size) is int and 0 < size < _MAX_MEMORY for size in memory)
        or not all(type(index) is int for index in order)
        or (order and sorted(order) != [*range(len(cards))])
        or len(near) not in (0, len(cards))
        or len(pci) not in (0, len(cards))
        or not all(isinstance(address, str) and 0 < len(address) <= _MAX_NAME for address in pci)
        or not isinstance(host, str)
        or len(host) > _MAX_NAME
    ):
        raise malformed
    return VisibleDevices(
        kind,
        tuple(cards),
        tuple(memory),
        order=order,
        near=near,
        host=host,
        pci=pci,
    )
