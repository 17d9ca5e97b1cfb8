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
from siirl_dask.context import Rank
from siirl_dask.worker.fork_server import START_METHOD, prepare_processes

_TIMEOUT = timedelta(seconds=60)


def run_ranks(size: int, function: Callable[[Rank], Any], folder: Path) -> list[Any]:
    """Call ``function(rank)`` in ``size`` new processes that share a gloo group on loopback. Returns their results.

    Results are tensors, numbers, strings and containers of them; ``folder`` is an empty folder to exchange them. An
    exception in a rank is raised here, with its traceback.
    """
    payload = cloudpickle.dumps(function)
    prepare_processes()
    start_processes(_run_rank, (size, payload, str(folder)), nprocs=size, start_method=START_METHOD)
    return [torch.load(folder / f"result-{rank}", weights_only=True) for rank in range(size)]


def _run_rank(rank: int, size: int, payload: bytes, folder: str) -> None:
    listen_at(LOOPBACK)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        result = cloudpickle.loads(payload)(Rank(rank, size, dist.group.WORLD))
        torch.save(result, f"{folder}/result-{rank}")
        dist.barrier()  # a rank that is done must not destroy the group under another
    finally:
        dist.destroy_process_group()
