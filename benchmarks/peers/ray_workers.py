"""Shared by the systems on Ray: one Ray for all of them, and actors that hold rows."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from method import PATIENCE
from work import Held, Work, make_rows

_HERE = Path(__file__).resolve().parents[1]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # with its default of 8, TransferQueue takes thirty times as long on a small machine
    "TQ_NUM_THREADS": "1",
    "PYTHONPATH": str(_HERE),
}
_SETTINGS = {"RAY_memory_monitor_refresh_ms": "0", "RAY_AUTH_MODE": "disabled"}
"""Ray kills no worker when others fill the machine's memory, and asks for no token: one of an
earlier start lies in the home folder, and nodes that start side by side do not agree on it."""
_LEAST_STORE = 2_000_000_000  # bytes


class RowHolder:
    """An actor. The first ``work.sources`` of them hold rows; what arrives is kept in
    ``self.received``.
    """

    def __init__(self, work: Work, rank: int) -> None:
        # There are as many workers as cores: with more threads each, torch.cat takes ten times as
        # long.
        torch.set_num_threads(1)
        self.work = work
        self.rows = make_rows(work, rank) if rank < work.sources else None
        self.received: Any = None

    def ready(self) -> None: ...

    def check(self) -> Held:
        raise NotImplementedError

    def drop(self) -> None:
        self.received = None


class HolderMethod:
    """A method on such actors: what all of them do alike."""

    def __init__(self, name: str, work: Work, holders: Sequence[Any]) -> None:
        self.name = name
        self.work = work
        self.holders = holders
        self.sources = holders[: work.sources]
        self.destinations = holders[work.targets]

    def before(self) -> None: ...

    def check(self) -> list[Held]:
        return get([holder.check.remote() for holder in self.destinations])

    def driver_bytes(self) -> int:
        return 0

    def after(self) -> None:
        get([holder.drop.remote() for holder in self.holders])


def start_ray(work: Work, address: str = "") -> None:
    """Start Ray on this machine unless another system here has done so, or join the one at
    ``address``.
    """
    if ray.is_initialized():
        return
    torch.set_num_threads(1)
    os.environ.update(_SETTINGS)
    if address:
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": _ENVIRONMENT},
        )
        return
    ray.init(
        num_cpus=max(16, 2 * (work.sources + work.destinations)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=max(_LEAST_STORE, 8 * work.payload_bytes),
        runtime_env={"env_vars": _ENVIRONMENT},
    )


def stop_ray() -> None:
    """Systems on Ray are closed together: the first one ends it for all."""
    ray.shutdown()


def start_holders(kind: type[RowHolder], work: Work, address: str = "") -> list[Any]:
    """One actor of ``kind`` per worker; rows are made when this returns. On a Ray that was there
    each is on a node of its own, in the order of the nodes' addresses.
    """
    start_ray(work, address)
    actor: Any = ray.remote(num_cpus=0)(kind)
    nodes = _nodes(work.workers) if address else []
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes] or [
        "DEFAULT"
    ] * work.workers
    holders = [
        actor.options(scheduling_strategy=place).remote(work, rank)
        for rank, place in enumerate(places)
    ]
    get([holder.ready.remote() for holder in holders])
    return holders


def _nodes(count: int) -> list[str]:
    """Return the ids of ``count`` nodes, in the order of their addresses, as soon as there are
    so many.
    """
    deadline = time.monotonic() + PATIENCE
    while len(nodes := [node for node in ray.nodes() if node["Alive"]]) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(nodes)} nodes of Ray: expected {count}")
        time.sleep(0.2)
    nodes.sort(key=lambda node: str(node["NodeManagerAddress"]))
    return [str(node["NodeID"]) for node in nodes[:count]]


def get(references: Sequence[Any]) -> list[Any]:
    results: list[Any] = ray.get(list(references), timeout=PATIENCE)
    return results
