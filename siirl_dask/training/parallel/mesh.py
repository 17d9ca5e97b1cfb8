"""The ranks of a role as a mesh: one row of them, or replicas and within each the shards of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stubs
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from siirl_dask.collectives import LOOPBACK, gloo_options, new_subgroup
from siirl_dask.context import Rank
from siirl_dask.training.preflight import check_divides

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def role_mesh(rank: Rank, shard_size: int | None, device: torch.device) -> DeviceMesh:
    """[shard], or [replicate, shard]. ConfigError when ``shard_size`` does not divide the role's ranks.

    Groups that have to be made for it last as long as the process's default group.
    """
    size = shard_size or rank.size
    check_divides("trainer.fsdp.shard_size", size, rank.size)
    if rank.size > 1 and rank.group is None:
        raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
    if rank.group is None:
        return _one_axis(_group_of_one(_BACKENDS[device.type]), device)
    if size == rank.size:
        return _one_axis(rank.group, device)
    return _two_axes(rank, size, device, ("replicate", "shard"))


def _one_axis(group: Any, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(_axis("shard", group),))


def _axis(name: str, group: Any) -> str:
    """DTensor keeps what operations give, mesh included, by meshes that are equal: those of another role or of a run
    before this one on the same ranks, whose groups have other names, must not be.
    """
    return f"{name} of group {group.group_name}"


def tensor_mesh(rank: Rank, size: int, device: torch.device) -> DeviceMesh:
    """[data, tensor]: neighbours in the role, ``size`` of them, share the heads of each layer. ConfigError when it does
    not divide the role's ranks.
    """
    check_divides("trainer.fsdp.tensor_parallel", size, rank.size)
    return _two_axes(rank, size, device, ("data", "tensor"))


def _two_axes(rank: Rank, size: int, device: torch.device, names: tuple[str, str]) -> DeviceMesh:
    """[role / size, size], neighbours in the role in a row."""
    places = torch.tensor(dist.get_process_group_ranks(rank.group)).reshape(-1, size)
    row, column = divmod(rank.rank, size)
    _even_out(rank.group, device)
    groups = [new_subgroup(ranks.tolist(), rank.group) for ranks in (places[:, column], places[row])]
    axes = tuple(_axis(name, group) for name, group in zip(names, groups, strict=True))
    return DeviceMesh.from_group(groups, device.type, mesh=places, mesh_dim_names=axes)


def sequence_ranks(rank: Rank, size: int, device: torch.device) -> Rank:
    """This rank among the ``size`` that share tokens with it, neighbours in the role; all ranks of the role must call.

    ConfigError when ``size`` does not divide the role's ranks.
    """
    check_divides("trainer.fsdp.sequence_parallel", size, rank.size)
    if size == 1:
        return Rank()
    row, place = divmod(rank.rank, size)
    if size == rank.size:
        return Rank(place, size, rank.group)
    _even_out(rank.group, device)
    ranks = dist.get_process_group_ranks(rank.group)[row * size : (row + 1) * size]
    return Rank(place, size, new_subgroup(ranks, rank.group))


def _even_out(role: Any, device: torch.device) -> None:
    """Make groups of one, until all ranks of the role are in as many groups. A group that only its own ranks make has a
    name that depends on that number: where they were in different ones, they would wait for each other for ever.
    """
    count = torch.tensor(len(c10d._world.pg_names), device=device)
    most = count.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=role)
    for _ in range(int(most - count)):
        new_subgroup([dist.get_rank()], role)


def _group_of_one(backend: str) -> Any:
    """A group for a rank that is alone: FSDP wants one."""
    if dist.is_initialized():
        # where workers share devices, the world's backend is gloo and cannot serve
        return new_subgroup([dist.get_rank()], dist.group.WORLD, backend)
    options = gloo_options(LOOPBACK) if backend == "gloo" else None
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, pg_options=options)
    return dist.group.WORLD
