"""Process groups of torch.distributed, with gathers and sums over them, the stores by which they
meet, and the addresses at which they listen.

Collectives use types that gloo, NCCL and HCCL all have: HCCL reduces no float64 and no uint8. Small
numbers and bytes travel over a gloo group, whose waits end when a run is stopped; a device would
have to be waited for.

By default gloo listens where the host's name leads: on Debian at 127.0.1.1, which no other host
reaches, elsewhere at an address of the network even if all ranks are on one machine. torch 2.13
passes gloo no options, so the environment names the interface: that of the worker's own address.
"""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import psutil  # type: ignore[import-untyped]  # Dask needs it
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]  # no stubs
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.nn.functional import pad

from siirl_dask.devices import DeviceKind, traits_of
from siirl_dask.errors import ConfigError

LOOPBACK = "127.0.0.1"
BACKENDS: dict[str, str] = {kind: traits_of(kind).backend for kind in DeviceKind}
"""Backend of torch.distributed for each kind of device."""
_GLOO = "GLOO_SOCKET_IFNAME"
_SLICE = 0.1  # seconds between two calls of a check
_worlds: WeakSet[Any] = WeakSet([distributed_c10d._world])
# torch 2.11 sorts them
_TORCH_CAN_LEAVE_UNSORTED = "sort_ranks" in inspect.signature(dist.new_group).parameters


def listen_at(host: str) -> None:
    """Make all process groups that this process makes from now on listen at its own address
    ``host``.

    A user who names interfaces of nccl or hccl in the environment is obeyed: those carry data on
    networks of their own. ConfigError when no interface of this machine has the address.
    """
    interface = interface_of(host)
    os.environ[_GLOO] = interface
    for traits in map(traits_of, DeviceKind):
        # https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html and CANN's reference:
        # "=" is an exact match
        if traits.interface is not None:
            os.environ.setdefault(traits.interface, f"={interface}")
        if traits.interface_family is not None:
            os.environ.setdefault(traits.interface_family, "AF_INET6" if ":" in host else "AF_INET")


@contextmanager
def listening_at(host: str) -> Iterator[None]:
    """Make gloo groups that are made inside the block listen at ``host``: a process may not be a
    worker's.
    """
    before = os.environ.get(_GLOO)
    os.environ[_GLOO] = interface_of(host)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GLOO]
        else:
            os.environ[_GLOO] = before


def host_store(host: str, timeout: float) -> tuple[TCPStore, int]:
    """Return a store on a free port of ``host``, and the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
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
    """Return a client of the store that another worker hosts."""
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))


def interface_of(host: str) -> str:
    """Return the name of the network interface that has the address ``host``. ConfigError when
    none has.
    """
    interfaces: dict[str, Any] = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(address.address.partition("%")[0] == host for address in addresses):
            return name
    known = ", ".join(address.address for addresses in interfaces.values() for address in addresses)
    raise ConfigError(
        f"a worker's address is {host}, which no network interface of its machine has (they have "
        f"{known}); start it with dask worker --host or --interface"
    )


def backends() -> list[str]:
    """Return those of gloo, nccl and hccl that this torch has; a plug-in's is there once torch
    has imported it.
    """
    return [name for name in BACKENDS.values() if _has_backend(name)]


def _has_backend(name: str) -> bool:
    # of torch's own; it lists them all
    built: Callable[[], bool] | None = getattr(dist, f"is_{name}_available", None)
    if built is None:
        return name in dist.Backend.backend_list
    return built()


def new_group(ranks: Sequence[int], backend: str, timeout: float) -> Any:
    """Make a group of some ranks of the default group, all of whose ranks must call this in the
    same order.

    A rank's place in ``ranks`` is its rank in the group.
    """
    return _unsorted_group(ranks, timeout=timedelta(seconds=timeout), backend=backend)


def new_subgroup(ranks: Sequence[int], parent: Any, backend: str | None = None) -> Any:
    """Make a group that only its own ranks need to call, by default with the backend of their group
    ``parent``.

    Its name depends on the number of groups that a process is in: ranks that differ in it would
    wait for ever. Its timeout is that of ``parent``.
    """
    if backend is None:
        backend = dist.get_backend(parent)
    timeout = parent._get_backend(parent._device_types[0]).options._timeout
    return _unsorted_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)


def _unsorted_group(ranks: Sequence[int], **options: Any) -> Any:
    """Make a group in which a rank's place in ``ranks`` is its rank. ``options`` are those of
    torch's ``new_group``.
    """
    if _TORCH_CAN_LEAVE_UNSORTED:
        return dist.new_group(list(ranks), sort_ranks=False, **options)
    return dist.new_group(
        [_RankAtPlace(rank, place) for place, rank in enumerate(ranks)], **options
    )


class _RankAtPlace(int):
    """A rank that sorts by its place: torch 2.11 sorts the ranks of a new group."""

    place: int

    def __new__(cls, rank: int, place: int) -> _RankAtPlace:
        made = super().__new__(cls, rank)
        made.place = place
        return made

    def __lt__(self, other: int) -> bool:
        if isinstance(other, _RankAtPlace):
            return self.place < other.place
        return int(self) < other


def add_world(world: Any) -> None:
    """Have ``abort_device_groups`` know the groups of another record of groups than torch's own."""
    _worlds.add(world)


def device_backends() -> list[Any]:
    """Return what runs the collectives of this process's groups on its devices, such as nccl:
    all but gloo.
    """
    found: list[Any] = []
    for world in [*_worlds]:
        for group in [*world.pg_map]:  # a copy: another thread may be making groups
            served = [group._get_backend(device) for device in group._device_types]
            found += [
                backend for backend in served if backend.name() != "gloo" and backend not in found
            ]
    return found


def abort_device_groups() -> None:
    """End all collectives that run on devices of this process. Any thread may call this.

    A kernel of nccl waits for its peers on the device, and nothing but this or the group's timeout
    ends it. What such a collective was to write is of no use afterwards, nor are the groups.
    """
    backends = device_backends()
    first = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    # apart from each other, aborts of several communicators may wait for each other
    if first is not None:
        first._group_start()
    try:
        for backend in backends:
            backend.abort()
    finally:
        if first is not None:
            first._group_end()


def new_gloo_group(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    """Make a gloo group outside any world: ``size`` ranks that know the same ``store``. It
    listens at ``host``.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return ProcessGroupGloo(store, rank, size, options)


def all_gather(group: Any, tensor: Tensor, check: Callable[[], None] | None = None) -> Tensor:
    """Gather the tensors of all ranks on the CPU. [...] -> [ranks, ...], of one shape and type on
    all ranks.

    ``tensor`` is on a device that the group's backend takes. RuntimeError if a rank is gone; for
    ``check`` see ``finish``.
    """
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    finish(group.allgather([parts], [tensor]), check)
    return torch.stack(parts).cpu()


def all_gather_bytes(
    group: Any, message: bytes, check: Callable[[], None] | None = None
) -> list[bytes]:
    """Gather the messages of all ranks of a gloo group, in rank order; all must call.
    RuntimeError if one is gone.
    """
    own = (
        torch.frombuffer(bytearray(message), dtype=torch.uint8)
        if message
        else torch.zeros(0, dtype=torch.uint8)
    )
    lengths = all_gather(group, torch.tensor([len(own)]), check).flatten().tolist()
    if not any(lengths):
        return [b""] * len(lengths)
    parts = all_gather(group, pad(own, (0, max(lengths) - len(own))), check)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def all_sum(
    group: Any,
    values: Sequence[float],
    check: Callable[[], None] | None = None,
    *,
    ranks: Sequence[int] | None = None,
) -> list[float]:
    """Sum each number over the ranks of a gloo group, in float64 and in rank order; every rank gets
    the same bits.

    All ranks must call; ``ranks`` are those whose numbers count, by default all. The numbers travel
    as the integers that their bits are. None is a group of one.
    """
    numbers = torch.tensor(values, dtype=torch.float64)
    if group is None:
        return numbers.tolist()
    gathered = all_gather(group, numbers.view(torch.int64), check).view(torch.float64)
    total = torch.zeros_like(numbers)
    for rank in range(len(gathered)) if ranks is None else ranks:
        total += gathered[rank]
    return total.tolist()


def finish(work: Any, check: Callable[[], None] | None = None) -> None:
    """Wait until a collective is done. ``check`` is called ten times a second: what it raises ends
    the wait.

    gloo has no way to end a collective whose peers never come, other than its timeout.
    """
    if check is not None:
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(_SLICE):
            check()
    work.wait()
