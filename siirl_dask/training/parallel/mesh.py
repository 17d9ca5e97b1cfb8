"""Device meshes over the ranks of a role: FSDP, HSDP, and tensor parallelism; and
sequence-parallel groups.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stubs
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from siirl_dask.collectives import BACKENDS, LOOPBACK, listening_at, new_subgroup
from siirl_dask.context import Rank
from siirl_dask.training.layouts import check_divides


def role_mesh(rank: Rank, shard_size: int | None, device: torch.device) -> DeviceMesh:
    """Return the mesh [shard] of FSDP, or [replicate, shard] of HSDP if ``shard_size`` is less than
    the role's ranks.

    ConfigError when ``shard_size`` does not divide them. New process groups live as long as the
    default group.
    """
    size = rank.size if shard_size is None else shard_size
    check_divides("trainer.fsdp.shard_size", size, rank.size)
    if rank.size > 1 and rank.group is None:
        raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
    if rank.group is None:
        return one_axis(group_of_one(device.type), device)
    if size == rank.size:
        return one_axis(rank.group, device)
    return _two_axes(rank, size, device, ("replicate", "shard"))


def one_axis(group: Any, device: torch.device, name: str = "shard") -> DeviceMesh:
    """Return the mesh [name] of a group."""
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(_axis(name, group),))


def _axis(name: str, group: Any) -> str:
    """Return a name that makes meshes of different groups unequal, and those of a process whose
    rank has changed.

    DTensor caches an operation's result, mesh included, for all equal meshes. Another role, or an
    earlier run on the same ranks, has other groups, and must not get a cached mesh; nor must the
    next try of an elastic run, whose groups have the same names and ranks, and in which this
    process may be another one of these.
    """
    return f"{name} of group {group.group_name}, rank {dist.get_rank()}"


def tensor_mesh(rank: Rank, size: int, device: torch.device) -> DeviceMesh:
    """Return the mesh [data, tensor], where ``size`` neighbours in the role split each layer.
    ConfigError when ``size`` does not divide the role's ranks.
    """
    check_divides("trainer.fsdp.tensor_parallel", size, rank.size)
    return _two_axes(rank, size, device, ("data", "tensor"))


def _two_axes(rank: Rank, size: int, device: torch.device, names: tuple[str, str]) -> DeviceMesh:
    """Return the mesh [role's ranks / size, size], with neighbours in the role in a row."""
    places = torch.tensor(dist.get_process_group_ranks(rank.group)).reshape(-1, size)
    row, column = divmod(rank.rank, size)
    even_out(rank.group, device)
    groups = [
        new_subgroup(ranks.tolist(), rank.group) for ranks in (places[:, column], places[row])
    ]
    axes = tuple(_axis(name, group) for name, group in zip(names, groups, strict=True))
    return DeviceMesh.from_group(groups, device.type, mesh=places, mesh_dim_names=axes)


def sequence_ranks(rank: Rank, size: int, device: torch.device) -> Rank:
    """Return this rank in its sequence-parallel group of ``size`` neighbours; all ranks of the role
    must call.

    ConfigError when ``size`` does not divide the role's ranks.
    """
    check_divides("trainer.fsdp.sequence_parallel", size, rank.size)
    if size == 1:
        return Rank()
    row, place = divmod(rank.rank, size)
    if size == rank.size:
        return Rank(place, size, rank.group)
    even_out(rank.group, device)
    ranks = dist.get_process_group_ranks(rank.group)[row * size : (row + 1) * size]
    return Rank(place, size, new_subgroup(ranks, rank.group))


def even_out(role: Any, device: torch.device) -> None:
    """Create groups of one until all ranks of the role are in equally many groups.

    A group that only its own ranks create is named after that number. Ranks with different numbers
    would look for each other under different names and wait for ever.
    """
    count = torch.tensor(len(c10d._world.pg_names), device=device)
    largest = count.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=role)
    for _ in range(int(largest - count)):
        new_subgroup([dist.get_rank()], role)


def group_of_one(kind: str) -> Any:
    """Return a process group with this rank alone, which FSDP needs, for devices of a kind such as
    ``cuda``.

    In a run with one worker it is the default group, of which DCP's asynchronous saves want a CPU
    backend as well.
    """
    backend = BACKENDS[kind]
    if dist.is_initialized():
        # where workers share devices, the world's backend is gloo and cannot serve
        return new_subgroup([dist.get_rank()], dist.group.WORLD, backend)
    both = backend if kind == "cpu" else f"cpu:gloo,{kind}:{backend}"
    with listening_at(LOOPBACK):
        dist.init_process_group(both, store=HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
