"""A run as seen from outside: its sockets, and its nodes by name on the Dask dashboard."""

import ipaddress
import json
import re
import signal
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
from distributed import Client
from prometheus_client.parser import text_string_to_metric_families

from tests.grafana import BOARD, queries

PROFILED = ["profile.steps=[2]", "profile.roles=[policy]"]
APART = ["cluster.workers=2", "cluster.placement={rollout: [0], policy: [1]}"]


@pytest.mark.slow
def test_nothing_listens_beyond_loopback_while_a_run_is_under_way(start):
    run = start(
        "run.steps=100000", "cluster.workers=2", "cluster.placement={rollout: [0], policy: [0, 1]}"
    )
    run.wait_for_steps(1)
    family = [psutil.Process(run.process.pid), *run.family]
    listening = [
        c.laddr.ip
        for process in family
        for c in process.net_connections("inet")
        if c.status == "LISTEN"
    ]
    assert len(listening) > 5  # scheduler, dashboard, nannies, workers, the process groups
    assert all(ipaddress.ip_address(ip).is_loopback for ip in listening), listening
    run.process.send_signal(signal.SIGTERM)
    run.end(timeout=60)


def test_each_node_shows_by_its_name_in_fine_performance_metrics(train, cluster_address):
    """And each link that rows came by, with their bytes."""
    apart = "cluster.placement={rollout: [0], policy: [1]}"
    train("run", "run.steps=3", "cluster.workers=2", apart)

    async def beat(dask_worker):
        await dask_worker.heartbeat()  # metrics reach the scheduler with it

    def labels(dask_scheduler):
        return sorted(
            {str(part) for key in dask_scheduler.cumulative_worker_metrics for part in key}
        )

    def links(dask_scheduler):
        amounts = dask_scheduler.cumulative_worker_metrics.items()
        return {str(key[-2]): amount for key, amount in amounts if key[-1] == "bytes"}

    with Client(cluster_address) as client:
        client.run(beat)
        shown = client.run_on_scheduler(labels)
        received = client.run_on_scheduler(links)
    for node in (
        "prompts",
        "rollout",
        "reward",
        "old_logprobs",
        "advantage",
        "update",
        "weights",
        "load_weights",
    ):
        assert node in shown
    moved = {link: amount for link, amount in received.items() if "->" in link}
    assert moved
    assert min(moved.values()) > 0


def scraped(url):
    """Values by the name and the labels of a sample."""
    with urlopen(f"{url}/metrics") as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        (s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples
    }


def test_prometheus_gets_what_the_run_did_and_all_that_the_dashboard_asks_for(
    train, cluster_address, digits_task
):
    validation = f"validation.url={digits_task.validation}"
    done = train(
        "scraped",
        "run.name=scraped",
        "run.steps=3",
        "observe.trace=true",
        validation,
        *APART,
        *PROFILED,
    )
    profiles = {path.relative_to(done.url).as_posix() for path in done.url.glob("profile/*/*")}
    nodes = ("old_logprobs", "advantage", "minibatches", "update")
    assert profiles == {f"profile/step=000002/{node}.1.json.gz" for node in nodes}
    with Client(cluster_address) as client:
        info = client.scheduler_info(n_workers=-1)
        host = urlsplit(info["address"]).hostname
        of_run = scraped(f"http://{host}:{info['services']['dashboard']}")
        of_workers = [
            scraped(f"http://{host}:{one['services']['dashboard']}")
            for one in info["workers"].values()
        ]

    def total(name, **labels):
        return sum(
            value
            for samples in of_workers
            for (known, *found), value in samples.items()
            if known == name and {"run": "scraped", **labels}.items() <= dict(found).items()
        )

    records, run = done.records(), ("run", "scraped")
    assert of_run["siirl_run_step", run] == 3
    assert of_run["siirl_run_reward", run] == pytest.approx(records[-1]["metrics"]["reward/mean"])
    for name, metric in (
        ("samples", "samples"),
        ("tokens", "tokens"),
        ("peer_bytes", "bytes/peers"),
    ):
        assert of_run[f"siirl_run_{name}_total", run] == sum(
            record["metrics"][metric] for record in records
        )
    assert total("siirl_worker_tokens_total") == of_run["siirl_run_tokens_total", run]
    everything = [*records, *done.records("validation")]
    assert total("siirl_worker_received_bytes_total") == sum(
        record["metrics"]["bytes/peers"] for record in everything
    )
    assert total("siirl_worker_iterations_total", phase="train") == 3 * 2
    assert total("siirl_worker_lane_seconds_total", lane="compute") > 0

    shown = {name for name, *labels in (*of_run, *(key for one in of_workers for key in one))}
    asked = {
        name
        for query in queries(json.loads(BOARD.read_text()))
        for name in re.findall(r"\b(?:siirl|process|dask)_\w+", query)
    }
    assert asked - {"siirl_worker_device_bytes"} <= shown  # that takes an accelerator
