"""Which device each worker of a run computes on.

A worker's rank says nothing of the devices it sees: hosts differ, and a launcher may show each worker all of a host's
devices in another order, or one of them. So each tells the others through the run's store what it sees, and all work
out the same answer from all of that.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from siirl_dask.context import Device, DeviceKind
from siirl_dask.errors import PeerError
from siirl_dask.worker.stop import StopFlag

logger = logging.getLogger("siirl_dask.worker")
_SLICE = 0.1  # seconds between two looks whether all have said what they see
_MOST_DEVICES, _LONGEST_NAME, _MOST_BYTES = 256, 200, 2**16  # of what a peer says


class Store(Protocol):
    """What torch.distributed's stores do."""

    def set(self, key: str, value: str) -> None: ...
    def add(self, key: str, value: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """The devices that a worker sees, in its own order, by names that are theirs in all of the run; none, its CPU."""

    kind: DeviceKind = DeviceKind.CPU
    cards: tuple[str, ...] = ()


def find_devices(
    worker: str, workers: Sequence[str], store: Store | None, timeout: float, stop: StopFlag
) -> dict[str, Device]:
    """Every worker's device, in the order of ``workers``; ``worker``, which calls this, computes on its own from here
    on. ``store`` may be None where it is the only one. PeerError when another has not said within ``timeout`` seconds
    what it sees.
    """
    visible = visible_devices()
    visible_to = {worker: visible} if store is None else exchange(worker, workers, visible, store, timeout, stop)
    devices = assign(visible_to)
    own = devices[worker]
    if own.kind is not DeviceKind.CPU:
        torch.get_device_module(str(own.kind)).set_device(own.index)
    if own.shared_by > 1:
        others = own.shared_by - 1
        logger.warning("worker %r shares %s (%s) with %d others", worker, own.torch_name, own.card, others)
    return devices


def visible_devices() -> VisibleDevices:
    """What this process sees."""
    if torch.cuda.is_available():
        devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return VisibleDevices(DeviceKind.CUDA, tuple(str(device.uuid) for device in devices))
    npu: Any = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        return VisibleDevices(DeviceKind.NPU, npu_ids(socket.gethostname(), npu.device_count(), visible))
    return VisibleDevices()


def npu_ids(host: str, count: int, visible: str | None) -> tuple[str, ...]:
    """They have no id of their own: host and place on it, of which ``visible`` lists those that a process sees."""
    listed = [place.strip() for place in visible.split(",")] if visible else []
    places = listed if len(listed) == count else range(count)
    return tuple(f"{host}/npu{place}" for place in places)


def assign(visible_to: Mapping[str, VisibleDevices]) -> dict[str, Device]:
    """Each worker's device: of those that it sees, the first that fewest have taken so far. Those that have fewest to
    choose from come first, else the order is the run's.

    Where every worker sees all devices of its host, in any order, or one of them, none is shared while another that a
    sharer sees is free.
    """
    takers: Counter[str] = Counter()
    chosen: dict[str, int] = {}
    for worker in sorted(visible_to, key=lambda name: len(visible_to[name].cards)):
        cards = visible_to[worker].cards
        if cards:
            chosen[worker] = min(range(len(cards)), key=lambda index: (takers[cards[index]], index))
            takers[cards[chosen[worker]]] += 1
    return {worker: _device(worker, visible, chosen, takers) for worker, visible in visible_to.items()}


def _device(worker: str, visible: VisibleDevices, chosen: Mapping[str, int], takers: Mapping[str, int]) -> Device:
    if worker not in chosen:
        return Device(worker)
    card = visible.cards[chosen[worker]]
    return Device(worker, visible.kind, chosen[worker], card, takers[card])


def exchange(
    worker: str, workers: Sequence[str], visible: VisibleDevices, store: Store, timeout: float, stop: StopFlag
) -> dict[str, VisibleDevices]:
    """What each of ``workers`` sees, in their order; all of them call this once with the same ``store``. Aborted when
    the flag is set meanwhile.
    """
    keys = {name: f"visible/{rank}" for rank, name in enumerate(workers)}
    store.set(keys[worker], json.dumps({"kind": str(visible.kind), "cards": visible.cards}))
    said, deadline = store.add("announced", 1), time.monotonic() + timeout
    while said < len(workers):
        if time.monotonic() > deadline:
            missing = [name for name, key in keys.items() if not store.check([key])]
            raise PeerError(f"workers {missing} did not say within {timeout:g} s which devices they see")
        stop.wait(_SLICE)
        said = store.add("announced", 0)
    raw = store.multi_get(list(keys.values()))
    return {name: read_visible(name, text) for name, text in zip(keys, raw, strict=True)}


def read_visible(worker: str, raw: bytes) -> VisibleDevices:
    """What ``worker`` said. PeerError for anything that is none, or too much."""
    try:
        said: Any = json.loads(raw) if len(raw) <= _MOST_BYTES else None
        kind, cards = DeviceKind(said["kind"]), said["cards"]
    except (ValueError, TypeError, KeyError, RecursionError):
        kind, cards = DeviceKind.CPU, None
    if (
        not isinstance(cards, list)
        or len(cards) > _MOST_DEVICES
        or not all(isinstance(card, str) and 0 < len(card) <= _LONGEST_NAME for card in cards)
        or (kind is DeviceKind.CPU) != (not cards)
        or len(set(cards)) != len(cards)
    ):
        raise PeerError(f"worker {worker!r} says that it sees {raw[:200]!r}: expected a kind and names of devices")
    return VisibleDevices(kind, tuple(cards))
