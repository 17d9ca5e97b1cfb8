"""Joins the workers of a run in torch.distributed: one world, and one process group per role.

The first worker hosts the store and sends its peers the port over the data plane. All sockets bind
to the worker's own address, which is loopback for a cluster on one machine.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]  # no stubs

from siirl_dask import collectives
from siirl_dask.config import WeightSync
from siirl_dask.context import Device, Rank
from siirl_dask.devices import traits_of
from siirl_dask.errors import ConfigError
from siirl_dask.worker.groups import stuck_collectives
from siirl_dask.worker.monitoring.task_progress import TaskProgress
from siirl_dask.worker.stop import StopFlag

_MIN_WAIT = 3600.0  # seconds; a thread in gloo waits for a peer that stands still until its timeout
_epolls: set[int] = set()


def longest_wait(stall_timeout: float) -> float:
    """Return the seconds that a rank may be late in a collective. Stalls are noticed sooner by
    other means.
    """
    return max(6 * stall_timeout, _MIN_WAIT)


def epoll_descriptors() -> frozenset[int]:
    """Return the file descriptors that watch the connections of this process's groups: see
    ``stuck_collectives``.
    """
    return frozenset(_epolls)


@contextmanager
def _noting_epolls() -> Iterator[None]:
    before = stuck_collectives.epoll_descriptors()
    try:
        yield
    finally:
        _epolls.update(stuck_collectives.epoll_descriptors() - before)


@_noting_epolls()
def join(
    store: TCPStore,
    run: str,
    worker: str,
    devices: Mapping[str, Device],
    roles: Mapping[str, Sequence[str]],
    host: str,
    timeout: float,
) -> dict[str, Rank]:
    """Make the process groups of all roles and return this worker's rank in each of its own roles.

    ``devices`` are all workers' devices, in the order of ranks. Every worker makes every group, in
    the same order, as torch demands. ConfigError where a role's workers have no common backend.
    """
    workers = list(devices)
    backends = {}
    for role, members in roles.items():
        backends[role] = role_backend(role, [devices[member] for member in members])
    backend = backend_of(devices.values())
    collectives.listen_at(host)
    dist.init_process_group(
        backend,
        store=PrefixStore(run, store),
        rank=workers.index(worker),
        world_size=len(workers),
        timeout=timedelta(seconds=timeout),
    )
    ranks: dict[str, Rank] = {}
    for role, members in roles.items():
        global_ranks = [workers.index(member) for member in members]
        group = None
        cpu_group = None
        if len(members) > 1:
            group = collectives.new_group(global_ranks, backends[role], timeout)
            if backends[role] != "gloo":
                cpu_group = collectives.new_group(global_ranks, "gloo", timeout)
        side_group = collectives.new_group(global_ranks, "gloo", timeout)
        if worker in members:
            ranks[role] = Rank(
                members.index(worker),
                len(members),
                group=group,
                side_group=side_group,
                host=host,
                cpu_group=cpu_group,
            )
    return ranks


@_noting_epolls()
def broadcast_group(
    worker: str,
    devices: Mapping[str, Device],
    members: Sequence[str],
    timeout: float,
) -> object:
    """Make a process group of ``members``, of which the first has rank 0, and return it.

    It is None on other workers. All workers of the run call this after ``join``.
    """
    global_ranks = [list(devices).index(member) for member in members]
    backend = backend_of(devices[member] for member in members)
    group = collectives.new_group(global_ranks, backend, timeout)
    if worker not in members:
        return None
    # nccl connects at the first use and blocks until all ranks are there: here no rank is late, and
    # no step waits
    group.broadcast(torch.zeros(1, device=devices[worker].torch_name), 0).wait()
    return group


def uses_broadcast(weight_sync: WeightSync, devices: Sequence[Device]) -> bool:
    """Return whether weights travel by broadcast between workers on these devices.

    No worker among them is both source and sink. ConfigError where ``rollout.weight_sync`` demands
    a broadcast that the devices cannot do.
    """
    backend = backend_of(devices)
    if weight_sync is WeightSync.auto:
        return backend != "gloo"
    if weight_sync is not WeightSync.broadcast:
        return False
    if backend == "gloo" and not _gloo_takes(devices):
        where = ", ".join(
            f"{device.worker!r} on {device.card or device.kind}" for device in devices
        )
        raise ConfigError(
            f"rollout.weight_sync=broadcast between workers {where}: expected a device of its own "
            "for each, since gloo takes none; take rollout.weight_sync=auto"
        )
    return True


def backend_of(devices: Iterable[Device]) -> str:
    """Return the torch.distributed backend for workers on these devices.

    nccl and hccl refuse two ranks on one device, and nccl two slices of one GPU (MIG) as well,
    which it knows by its PCI address ("Duplicate GPU detected"); gloo works on any, through the
    host's memory.
    """
    devices = list(devices)
    one_kind = len({device.kind for device in devices}) == 1
    separate_gpus = len({device.gpu for device in devices}) == len(devices)
    return collectives.BACKENDS[devices[0].kind] if one_kind and separate_gpus else "gloo"


def role_backend(role: str, devices: Sequence[Device]) -> str:
    """Return the backend of a role's process group.

    ConfigError on NPUs that share a card: hccl refuses them, and gloo takes tensors of CPUs and
    CUDA devices only.
    """
    backend = backend_of(devices)
    if len(devices) == 1 or backend != "gloo" or _gloo_takes(devices):
        return backend
    where = ", ".join(f"{device.worker!r} on {device.card or device.kind}" for device in devices)
    raise ConfigError(
        f"role {role!r} has workers {where}: expected a device of its own for each, since neither "
        "gloo nor what joins such devices takes two workers of a role on one; have fewer workers "
        "(cluster.workers), or give the role others (cluster.placement)"
    )


def _gloo_takes(devices: Iterable[Device]) -> bool:
    return all(traits_of(device.kind).gloo_takes for device in devices)


def single_ranks(roles: Mapping[str, Sequence[str]]) -> dict[str, Rank]:
    """Return the ranks of a run with one worker, which needs no process group."""
    return {role: Rank() for role in roles}


@dataclass(frozen=True, slots=True)
class RolePeers:
    """Implements ``Context``'s collectives among the workers of a role, over its gloo group.

    They raise Aborted once ``stop`` is set: a peer whose node failed never joins them.
    """

    rank: Rank
    stop: StopFlag
    progress: TaskProgress = field(default_factory=TaskProgress)

    def all_sum(self, values: Sequence[float]) -> list[float]:
        with self.progress.waiting():
            return collectives.all_sum(self.rank.cpu_group, values, self.stop.check)

    def all_gather(self, message: bytes) -> list[bytes]:
        group = self.rank.cpu_group
        if group is None:
            return [message]
        with self.progress.waiting():
            return collectives.all_gather_bytes(group, message, self.stop.check)


def leave(*, abort: bool) -> None:
    """Destroy all process groups of this process, if there are any.

    With ``abort`` collectives that are under way are ended first, here and at the peers: nccl would
    wait for its peers, and so would gloo, whose groups join their threads. Otherwise a peer that
    waits in a collective of gloo goes on when the last reference to a group is gone here, which
    closes its sockets.
    """
    epolls = epoll_descriptors()
    _epolls.clear()
    if not dist.is_initialized():
        return
    if abort:
        stuck_collectives.shut_down_connections(epolls)
    gc.collect()  # the frames of an exception may be in a cycle with a group
    if abort and collectives.device_backends():
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
