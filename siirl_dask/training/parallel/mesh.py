"""The ranks of a role as a mesh: one row of them, or lots that hold the same and within each the shards of a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]  # no stubs
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroupGloo

from siirl_dask.context import Rank
from siirl_dask.training.shares import check_divides

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def role_mesh(rank: Rank, shard_size: int | None, device: torch.device) -> DeviceMesh:
    """[shards], or [lots, shards]. ConfigError when ``shard_size`` does not divide the role's ranks.

    Groups that have to be made for it last as long as the process's default group.
    """
    size = shard_size or rank.size
    check_divides("trainer.shard_size", size, rank.size)
    if rank.size > 1 and rank.group is None:
        raise ValueError(f"{rank}: expected the process group of its {rank.size} ranks")
    if rank.group is None:
        return _one_axis(_group_of_one(_BACKENDS[device.type]), device)
    if size == rank.size:
        return _one_axis(rank.group, device)
    return _two_axes(rank, size, device, ("lots", "shards"))


def _one_axis(group: Any, device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=(_axis("shards", group),))


def _axis(name: str, group: Any) -> str:
    """DTensor keeps what operations give, mesh included, by meshes that are equal: those of another role or of a run
    before this one on the same ranks, whose groups have other names, must not be.
    """
    return f"{name} of group {group.group_name}"


def tensor_mesh(rank: Rank, size: int, device: torch.device) -> DeviceMesh:
    """[data, tensor]: neighbours in the role, ``size`` of them, share the heads of each layer. ConfigError when it does
    not divide the role's ranks.
    """
    check_divides("trainer.tensor_parallel", size, rank.size)
    return _two_axes(rank, size, device, ("data", "tensor"))


def _two_axes(rank: Rank, size: int, device: torch.device, names: tuple[str, str]) -> DeviceMesh:
    """[role / size, size], neighbours in the role in a row."""
    places = torch.tensor(dist.get_process_group_ranks(rank.group)).reshape(-1, size)
    row, column = divmod(rank.rank, size)
    _even_out(rank.group, device)
    groups = [_group(rank.group, ranks.tolist()) for ranks in (places[:, column], places[row])]
    axes = tuple(_axis(name, group) for name, group in zip(names, groups, strict=True))
    return DeviceMesh.from_group(groups, device.type, mesh=places, mesh_dim_names=axes)


def sequence_ranks(rank: Rank, size: int, device: torch.device) -> Rank:
    """This rank among the ``size`` that share tokens with it, neighbours in the role; all ranks of the role must call.

    ConfigError when ``size`` does not divide the role's ranks.
    """
    check_divides("trainer.sequence_parallel", size, rank.size)
    if size == 1:
        return Rank()
    lot, place = divmod(rank.rank, size)
    if size == rank.size:
        return Rank(place, size, rank.group)
    _even_out(rank.group, device)
    ranks = dist.get_process_group_ranks(rank.group)[lot * size : (lot + 1) * size]
    return Rank(place, size, _group(rank.group, ranks))


def _even_out(role: Any, device: torch.device) -> None:
    """Make groups of one, until all ranks of the role are in as many groups. A group that only its own ranks make has a
    name that depends on that number: where they were in different ones, they would wait for each other for ever.
    """
    count = torch.tensor(len(c10d._world.pg_names), device=device)
    most = count.clone()
    dist.all_reduce(most, dist.ReduceOp.MAX, group=role)
    for _ in range(int(most - count)):
        _group(role, [dist.get_rank()])


def _group(beside: Any, ranks: list[int], backend: str | None = None) -> Any:
    """A group that only its own ranks make, with the backend of ``beside`` if no other is given. gloo's listens where
    ``beside`` does.
    """
    backend = backend or dist.get_backend(beside)
    options = None
    if backend == "gloo":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
        options._devices = beside._get_backend(torch.device("cpu")).options._devices
    return dist.new_group(ranks, backend=backend, pg_options=options, use_local_synchronization=True)


def _group_of_one(backend: str) -> Any:
    """FSDP wants a group also for a rank that is alone."""
    if dist.is_initialized():
        return _group(dist.group.WORLD, [dist.get_rank()], backend)  # where devices are shared, the world's is gloo
    options = None
    if backend == "gloo":
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, pg_options=options)
    return dist.group.WORLD
