"""Process groups of torch.distributed, with gathers and sums over them; the only place that makes gloo's options.

By default gloo listens at the address that the host's name resolves to. Every group made here listens at a given
address, or at that of another group, so that a run on one machine stays on loopback.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroupGloo
from torch.nn.functional import pad

LOOPBACK = "127.0.0.1"
_SLICE = 0.1  # seconds between two calls of a check


def gloo_options(host: str, timeout: float | None = None) -> Any:
    """Return options of a gloo group that listens at ``host``. ``timeout`` is in seconds; None: torch's default."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    if timeout is not None:
        options._timeout = timedelta(seconds=timeout)
    return options


def gloo_options_like(group: Any) -> Any:
    """Return options of a gloo group that listens where the gloo group ``group`` does, with its timeout."""
    other = group._get_backend(torch.device("cpu")).options
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
    options._devices, options._timeout = other._devices, other._timeout
    return options


def new_group(ranks: Sequence[int], backend: str, host: str, timeout: float) -> Any:
    """Make a group of some ranks of the default group, all of whose ranks must call this in the same order."""
    options = gloo_options(host, timeout) if backend == "gloo" else None
    return dist.new_group(list(ranks), timeout=timedelta(seconds=timeout), backend=backend, pg_options=options)


def new_subgroup(ranks: Sequence[int], parent: Any, backend: str | None = None) -> Any:
    """Make a group that only its own ranks need to call, by default with the backend of their group ``parent``.

    Its name depends on the number of groups that a process is in: ranks that differ in it would wait for ever.
    """
    backend = backend or dist.get_backend(parent)
    options = gloo_options_like(parent) if backend == "gloo" else None
    return dist.new_group(list(ranks), backend=backend, pg_options=options, use_local_synchronization=True)


def all_gather(group: Any, tensor: Tensor, check: Callable[[], None] | None = None) -> Tensor:
    """Gather the tensors of all ranks on the CPU. [...] -> [ranks, ...], of one shape and type on all ranks.

    ``tensor`` is on a device that the group's backend takes. RuntimeError if a rank is gone; for ``check`` see
    ``finish``.
    """
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    finish(group.allgather([parts], [tensor]), check)
    return torch.stack(parts).cpu()


def all_gather_bytes(
    group: Any, message: bytes, device: torch.device | str = "cpu", check: Callable[[], None] | None = None
) -> list[bytes]:
    """Gather the messages of all ranks, in rank order. All of them must call it. RuntimeError if one is gone."""
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.zeros(0, dtype=torch.uint8)
    lengths = all_gather(group, torch.tensor([len(own)], device=device), check).flatten().tolist()
    parts = all_gather(group, pad(own, (0, max(lengths) - len(own))).to(device), check)
    return [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]


def all_sum(
    group: Any,
    values: Sequence[float],
    device: torch.device | str = "cpu",
    check: Callable[[], None] | None = None,
) -> list[float]:
    """Sum each number over the ranks, in float64; every rank gets the same bits."""
    numbers = torch.tensor(values, dtype=torch.float64, device=device)
    finish(dist.all_reduce(numbers, group=group, async_op=True), check)
    return numbers.tolist()


def finish(work: Any, check: Callable[[], None] | None = None) -> None:
    """Wait until a collective is done. ``check`` is called ten times a second: what it raises ends the wait.

    gloo has no way to end a collective whose peers never come, other than its timeout.
    """
    if check is not None:
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(_SLICE):
            check()
    work.wait()
