"""A run as seen from outside: its sockets, and its nodes by name on the Dask dashboard."""

import ipaddress
import signal

import psutil
from distributed import Client


def test_nothing_listens_beyond_loopback_while_a_run_is_under_way(start):
    run = start("run.steps=100000", "cluster.workers=2", "cluster.placement={rollout: [0], policy: [0, 1]}")
    run.wait_for_steps(1)
    family = [psutil.Process(run.process.pid), *run.family]
    listening = [c.laddr.ip for process in family for c in process.net_connections("inet") if c.status == "LISTEN"]
    assert len(listening) > 5  # scheduler, dashboard, nannies, workers, the process groups
    assert all(ipaddress.ip_address(ip).is_loopback for ip in listening), listening
    run.process.send_signal(signal.SIGTERM)
    run.end(timeout=30)


def test_each_node_shows_by_its_name_in_fine_performance_metrics(train, cluster_address):
    train("run", "run.steps=3")

    async def beat(dask_worker):
        await dask_worker.heartbeat()  # metrics reach the scheduler with it

    def labels(dask_scheduler):
        return sorted({str(part) for key in dask_scheduler.cumulative_worker_metrics for part in key})

    with Client(cluster_address) as client:
        client.run(beat)
        shown = client.run_on_scheduler(labels)
    for node in ("prompts", "rollout", "reward", "old_logprobs", "advantage", "update", "weights", "load_weights"):
        assert node in shown
