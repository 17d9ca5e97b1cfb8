"""Runs the ranks of a process group as processes on this machine."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from siirl_dask.collectives import LOOPBACK, listen_at
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices.accelerator import bind, visible_devices
from siirl_dask.worker.groups.process_groups import backend_of
from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes

# some ranks wait while others compute alone, on a machine that may be busy
_TIMEOUT = timedelta(seconds=180)


def run_ranks(
    size: int,
    function: Callable[[Rank], Any],
    folder: Path,
    kind: DeviceKind = DeviceKind.CPU,
) -> list[Any]:
    """Call ``function(rank)`` in ``size`` new processes that share a process group on loopback.
    Returns their results.

    ``kind`` is that of the devices on which they compute: each rank's is current there, and ranks
    share those of this machine where there are fewer. The group's backend is the one that a run
    would take for them; ``rank.side_group`` is a gloo group. Results are tensors on the CPU,
    numbers, strings and containers of them; ``folder`` is an empty folder to exchange them. An
    exception in a rank is raised here, with its traceback.
    """
    payload = cloudpickle.dumps(function)
    prepare_processes()
    start_processes(
        _run_rank, (size, payload, str(folder), kind), nprocs=size, start_method=START_METHOD
    )
    return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(size)]


def devices_of(size: int, kind: DeviceKind) -> dict[str, Device]:
    """Return the devices of ``size`` workers on this machine, in the order of ranks; ValueError
    if it has none.
    """
    names = [f"w{rank}" for rank in range(size)]
    if kind is DeviceKind.CPU:
        return {name: Device(name) for name in names}
    if (visible := visible_devices()).kind is not kind:
        raise ValueError(f"no {kind} is visible to this process: there is a {visible.kind}")
    indices = [rank % len(visible.cards) for rank in range(size)]
    return {
        name: Device(name, kind, index, visible.cards[index], indices.count(index))
        for name, index in zip(names, indices, strict=True)
    }


def _run_rank(rank: int, size: int, payload: bytes, folder: str, kind: DeviceKind) -> None:
    listen_at(LOOPBACK)
    torch.set_num_threads(1)
    devices = devices_of(size, kind)
    bind(kind, devices[f"w{rank}"].index)
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]  # no stubs
    backend = backend_of(devices.values()) if size > 1 else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        side_group = dist.new_group(backend="gloo")
        result = cloudpickle.loads(payload)(Rank(rank, size, dist.group.WORLD, side_group))
        torch.save(result, f"{folder}/result-{rank}")
        dist.barrier()  # a rank that is done must not destroy the group under another
    finally:
        dist.destroy_process_group()
