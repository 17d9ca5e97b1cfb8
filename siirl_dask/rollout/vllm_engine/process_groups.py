"""Keeps vLLM's process groups in a world of torch.distributed apart from the worker's.

vLLM takes the process's default group where there is one. A worker's default group spans all
workers, so an engine would wait there for workers that are not in it. An engine is one rank or,
with ``rollout.tensor_parallel_size``, a few: its groups are made in a world of their own, where
nobody else finds or destroys them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # no stubs
from torch.distributed import distributed_c10d as c10d

from siirl_dask.collectives import LOOPBACK, add_world, all_gather, all_gather_bytes, new_gloo_group
from siirl_dask.context import Device, DeviceKind, Rank
from siirl_dask.devices.accelerator import visible_devices
from siirl_dask.errors import ConfigError, counted

# torch finds groups by name in the whole process: these names differ from the worker's
_FIRST_NAME = 1_000_000
_LONGEST_REASON = 2000  # characters of a failure on another rank


class EngineRanks:
    """The ranks of one engine, which are neighbours in their role, and the store and group by
    which they meet.
    """

    def __init__(self, role: Rank, size: int) -> None:
        """``size`` neighbours of ``role`` form an engine; all ranks of the role must call.

        ConfigError when ``size`` does not divide the role's ranks.
        """
        if role.size % size:
            raise ConfigError(
                f"rollout.tensor_parallel_size={size}: expected a divisor of the role's "
                f"{counted(role.size, 'worker')}"
            )
        engine, self.rank = divmod(role.rank, size)
        self.size = size
        self.name = ""
        self._group: Any = None
        self.host = LOOPBACK  # a group of one rank speaks to nobody
        self.timeout = timedelta(0)
        self.see_all_devices = size == 1
        """Whether the process of each rank sees the devices of all; known once these are
        checked."""
        if size == 1:
            return
        if role.side_group is None:
            raise ValueError(f"{role}: expected the gloo group of its {role.size} ranks")
        self.host = role.host
        self.timeout = role.side_group._get_backend(torch.device("cpu")).options._timeout
        numbers = all_gather(role.side_group, torch.tensor([secrets.randbits(62)]))
        # a role may build engines one after the other
        self.name = f"engine-{int(numbers[engine * size]):x}"
        self._store = PrefixStore(self.name, c10d._get_process_group_store(role.side_group))
        self._group = new_gloo_group(
            PrefixStore("requests", self._store), self.rank, size, self.host, self.timeout
        )

    def gather(self, message: bytes, check: Callable[[], None] | None = None) -> list[bytes]:
        """Return the messages of all ranks, in order; all of them must call. RuntimeError when
        one is gone; ``check`` is called ten times a second: what it raises ends the wait.
        """
        if self._group is None:
            return [message]
        return all_gather_bytes(self._group, message, check)

    def failure_elsewhere(self) -> str | None:
        """Return why another rank cannot start, as far as one has said so."""
        for rank in range(self.size):
            if rank == self.rank or not self._store.check([_failure_of(rank)]):
                continue
            said = self._store.get(_failure_of(rank)).decode("utf-8", "replace")
            return f"rank {rank} of {self.size}: {said[:_LONGEST_REASON]}"
        return None

    def note_failure(self, reason: str) -> None:
        """Say why this rank cannot start, before its connections end: others fail of that then."""
        if self.size > 1:
            key = _failure_of(self.rank)
            self._store.set(key, reason.encode("utf-8", "replace").decode())
            self._store.get(key)  # only now it is certain that the others can see it

    def check_devices(self, device: Device) -> None:
        """Raise ConfigError when two ranks share an accelerator, or have slices (MIG) of one, which
        nccl and hccl refuse; look which devices the ranks see. All ranks must call.
        """
        if self.size == 1 or device.kind is DeviceKind.CPU:
            return
        gpus = [gpu.decode() for gpu in self.gather(device.gpu.encode())]
        if twice := [gpu for gpu in gpus if gpus.count(gpu) > 1]:
            raise ConfigError(
                f"rollout.tensor_parallel_size={self.size}: two workers of an engine share the "
                f"device {twice[0]}; give each one of its own (cluster.placement.rollout, "
                "cluster.workers), or take a smaller size"
            )
        cards = {card.decode() for card in self.gather(device.card.encode())}
        own = b"sees them" if cards <= {*visible_devices().cards} else b""
        self.see_all_devices = all(self.gather(own))

    def join(self, backend: str) -> None:
        """Make the default group of the entered world, where vLLM finds it; for a single rank
        vLLM makes its own.
        """
        if self.size > 1:
            store = PrefixStore("world", self._store)
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.size,
                timeout=self.timeout,
            )


class EngineWorld(c10d._World):
    """A record of process groups with tables of its own; torch keeps one record per process, in
    one variable.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = _FIRST_NAME
        self._tables: dict[str, dict[Any, Any]] = {}
        add_world(self)

    def _table(self, name: str) -> dict[Any, Any]:
        return self._tables.setdefault(name, {})

    pg_map = property(lambda self: self._table("pg_map"))
    pg_names = property(lambda self: self._table("pg_names"))
    pg_group_ranks = property(lambda self: self._table("pg_group_ranks"))
    pg_backend_config = property(lambda self: self._table("pg_backend_config"))
    tags_to_pg = property(lambda self: self._table("tags_to_pg"))
    pg_to_tag = property(lambda self: self._table("pg_to_tag"))

    @property
    def group_count(self) -> int:
        """The number of the next group, part of its name."""
        return self._count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self._count = value

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make torch.distributed use this world inside the block, and the process's own one
        again after it.
        """
        outside = c10d._world
        c10d._world = self
        try:
            yield
        finally:
            c10d._world = outside
            for group, name in outside.pg_names.items():
                _register_again(name, group)


@contextmanager
def without_queues() -> Iterator[None]:
    """Let vLLM's groups have no queues in shared memory inside: an executor would send ranks its
    messages there, and this one has none to send. A process that is killed while an engine starts
    would leave their files in /dev/shm.
    """
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    name = "create_from_process_group"
    usual = vars(MessageQueue)[name]
    setattr(MessageQueue, name, staticmethod(lambda *given, **named: None))
    try:
        yield
    finally:
        setattr(MessageQueue, name, usual)


def _failure_of(rank: int) -> str:
    """Return the key of a rank's failure in the store."""
    return f"failure of rank {rank}"


def _register_again(name: Any, group: Any) -> None:
    """Register a group's name again if it is missing: destroying one world's groups clears the
    names of all.
    """
    try:
        _resolve_process_group(name)
    except RuntimeError:
        _register_process_group(name, group)
