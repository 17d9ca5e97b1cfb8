"""torch.distributed among the workers of a run: one world, and in it one group per role.

The first worker hosts the store and tells its peers the port over the data plane. Everything binds to the host that the
worker itself is reached at, which is loopback for a cluster on one machine.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no stubs
from torch.distributed.distributed_c10d import ProcessGroupGloo

from siirl_dask.context import Device, DeviceKind, Rank

_BACKENDS = {DeviceKind.CPU: "gloo", DeviceKind.CUDA: "nccl", DeviceKind.NPU: "hccl"}


def host_store(host: str, timeout: float) -> tuple[TCPStore, int]:
    """A store on a free port of ``host``, and the port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        master_listen_fd=listener.detach(),
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
    )
    return store, port


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def join(
    store: TCPStore,
    run: str,
    worker: str,
    workers: Sequence[str],
    roles: Mapping[str, Sequence[str]],
    device: Device,
    host: str,
    timeout: float,
) -> dict[str, Rank]:
    """This worker's rank in each of its roles. Every worker makes every group, in the same order, as torch demands."""
    backend = _BACKENDS[device.kind]
    options = _gloo_options(host, timeout) if backend == "gloo" else None
    limit = timedelta(seconds=timeout)
    dist.init_process_group(
        backend,
        store=PrefixStore(run, store),
        rank=workers.index(worker),
        world_size=len(workers),
        timeout=limit,
        pg_options=options,
    )
    ranks: dict[str, Rank] = {}
    for role, members in roles.items():
        group, places = None, [workers.index(member) for member in members]
        if len(members) > 1:
            group = dist.new_group(places, timeout=limit, backend=backend, pg_options=options)
        beside = dist.new_group(places, timeout=limit, backend="gloo", pg_options=_gloo_options(host, timeout))
        if worker in members:
            ranks[role] = Rank(members.index(worker), len(members), group, beside, host)
    return ranks


def alone(roles: Mapping[str, Sequence[str]]) -> dict[str, Rank]:
    """The ranks of a run with one worker, which needs no process group."""
    return {role: Rank() for role in roles}


def all_sum(device: Device, rank: Rank, values: Sequence[float]) -> list[float]:
    """Each number summed over the ranks, in float64; every rank gets the same bits."""
    if rank.group is None:
        return list(values)
    numbers = torch.tensor(values, dtype=torch.float64, device=device.torch_name)
    dist.all_reduce(numbers, group=rank.group)
    return numbers.tolist()


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _gloo_options(host: str, timeout: float) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout)
    return options
