"""The broadcasts of a plan whose workers are threads of one process: over gloo on loopback, as between processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from siirl_dask.planner import Plan, Stream
from siirl_dask.worker.broadcast import Broadcast
from siirl_dask.worker.stop import StopFlag

_TIMEOUT = timedelta(seconds=4)  # what is still under way when a worker fails keeps its group for so long


def broadcasts(plan: Plan, stop: StopFlag, part: int) -> dict[str, dict[tuple[str, ...], Broadcast]]:
    """By worker and by who takes part: one for each stream of ``plan`` that may have one."""
    links = [link for chain in plan.chains.values() for link in chain.flat]
    found: dict[str, dict[tuple[str, ...], Broadcast]] = {worker: {} for worker in plan.chains}
    for joins in dict.fromkeys(link.joins for link in links if isinstance(link, Stream) and link.joins):
        ranked = [worker for worker in plan.chains if worker in joins]  # as torch's new_group ranks them
        groups = dict(zip(ranked, _groups(len(ranked)), strict=True))
        for worker in plan.chains:
            found[worker][joins] = Broadcast(
                members=joins,
                group=groups.get(worker),
                root=ranked.index(joins[0]),
                device="cpu",
                stop=stop,
                most=part,
            )
    return found


def _groups(size: int) -> list[Any]:
    store = dist.HashStore()  # type: ignore[attr-defined]  # no stubs
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: _group(store, rank, size), range(size)))


def _group(store: Any, rank: int, size: int) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # no stubs
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = _TIMEOUT
    return ProcessGroupGloo(store, rank, size, options)
