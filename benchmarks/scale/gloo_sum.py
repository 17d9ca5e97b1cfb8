"""A program: sums of gradients over gloo, as a trainer has them.

Arguments: rank, ranks, address of rank 0, bytes, rounds. Rank 0 prints the median.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from siirl_dask.training.optimizer import FlatGradients

from .cores import since, threads, total
from .pace import pace

_PAUSE = 0.3  # seconds: a mini-batch's passes lie between two sums


def main() -> None:
    rank, ranks, size, rounds = (int(sys.argv[at]) for at in (1, 2, 4, 5))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    store = dist.TCPStore(sys.argv[3], 7912, ranks, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    gradients = FlatGradients([torch.nn.Parameter(torch.zeros(size // 4))])
    seconds, used = [], 0.0
    for number in range(rounds + 1):
        dist.barrier()
        time.sleep(_PAUSE)
        before, began = threads(), time.perf_counter()
        gradients.reduce(dist.group.WORLD)
        if number:  # the first warms up
            seconds.append(time.perf_counter() - began)
            used += total(since(before, threads())).used
    dist.barrier()
    if rank == 0:
        print(json.dumps({"seconds": median(seconds), "used": used / rounds / pace()}), flush=True)


if __name__ == "__main__":
    main()
