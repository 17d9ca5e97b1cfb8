"""Clusters of worker processes on this machine."""

import json
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path

import dask
from distributed import LocalCluster, Scheduler

from siirl_dask.worker.process.fork_server import START_METHOD, prepare_processes

IDLE = {
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
}
"""Dask's periodic work, slowed down: every 10, 20 and 500 ms it costs four waiting workers a
fifth of a core."""

LOST = {"distributed.deploy.lost-worker-timeout": "1 day"}
"""Or Dask closes a nanny whose worker died 15 s ago, if it has just died once more."""


IDLE_HEARTBEAT = 1.5
"""Seconds between two heartbeats of a worker while nobody uses its cluster: half a second, as Dask
has it, costs four workers and their scheduler a fiftieth of a core. Below every ``peer_timeout``
of tests."""


@contextmanager
def local_cluster(
    workers: int, threads_per_worker: int = 1, **options: object
) -> Iterator[LocalCluster]:
    """Start a cluster like a run does, without the run's settings. ``options`` are
    LocalCluster's.
    """
    prepare_processes()
    with (
        dask.config.set(
            {"distributed.worker.multiprocessing-method": START_METHOD, **LOST, **IDLE}
        ),
        LocalCluster(
            n_workers=workers,
            threads_per_worker=threads_per_worker,
            memory_limit=0,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
            silence_logs=50,
            **options,
        ) as cluster,
    ):
        yield cluster


def beat_seldom_when_idle(scheduler: Scheduler) -> None:
    """Have workers send fewer heartbeats while no client is connected."""
    beat = scheduler.handlers["heartbeat_worker"]

    @wraps(beat)
    def beat_seldom(**message):
        answer = beat(**message)
        if scheduler.clients.keys() <= {"fire-and-forget"}:
            answer["heartbeat-interval"] = IDLE_HEARTBEAT
        return answer

    scheduler.handlers["heartbeat_worker"] = beat_seldom


def announced_address(file: Path, scheduler: subprocess.Popen) -> str:
    """Return the address that a scheduler writes into its file, which is there, and empty,
    before it is written.
    """
    while not file.exists() or not file.read_text().endswith("}"):
        assert scheduler.poll() is None
        time.sleep(0.02)
    return str(json.loads(file.read_text())["address"])


def lasting_port() -> int:
    """Return a free port for a server that starts later, or again: none of those that the kernel
    gives out.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest // 2, lowest)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
