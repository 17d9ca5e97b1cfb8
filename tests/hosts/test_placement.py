"""A run on several hosts moves what ``plan --hosts`` says crosses each link: four workers, two
on each host.
"""

import json

import pytest

from siirl_dask.cli import main
from siirl_dask.config.file import shipped
from siirl_dask.testing.hosts import Lab
from tests.conftest import digits_overrides
from tests.hosts.conftest import forked_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
CONFIG = shipped("quickstart.yaml")


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
    with Lab(2) as lab:
        yield (
            lab,
            forked_cluster(
                lab.hosts[0],
                [host for host in lab.hosts for _ in "ab"],
                tmp_path_factory.mktemp("dask"),
            ),
        )


def run_on(two_hosts, overrides, url):
    """Run the quickstart on the hosts; return the bytes between them in each step, and what the
    driver printed.
    """
    lab, cluster = two_hosts
    given = [*overrides, f"cluster.address={cluster.address}", f"run.url={url}"]
    process = cluster.run(lab.hosts[0], "-m", "siirl_dask.cli", "run", CONFIG, *given)
    out, _ = process.communicate(timeout=500)
    assert process.returncode == 0, out
    records = map(json.loads, (url / "metrics.jsonl").read_text().splitlines())
    return [
        record["metrics"]["bytes/hosts"] for record in records if record["phase"] == "train"
    ], out


def test_the_bytes_of_a_run_are_those_of_its_plan_and_two_engines_take_weights_once(
    two_hosts, digits_task, tmp_path, capsys
):
    placement = "cluster.placement={rollout: [0, 2, 3], reward: [0, 2, 3], policy: [1]}"
    overrides = [
        *digits_overrides(digits_task, tmp_path / "plan"),
        placement,
        "cluster.workers=4",
        "run.steps=3",
    ]
    main(["plan", str(CONFIG), *overrides, "--hosts", "2x2", "--format", "json"])
    links = json.loads(capsys.readouterr().out)["phases"]["train"]["links"]
    (weights,) = (link["bytes"] for link in links if link["edge"] == "weights->load_weights")
    rows = sum(link["bytes"] for link in links) - weights
    (file,) = digits_task.model.glob("*.safetensors")
    assert 0.95 * file.stat().st_size < weights < 1.1 * file.stat().st_size, (
        "the link carries one copy"
    )
    steps, _ = run_on(two_hosts, overrides, tmp_path / "run")
    for step in steps:
        assert 0.95 * weights < step < 1.02 * (weights + rows), "rows are counted at their longest"


@pytest.mark.sweep
def test_shards_on_two_hosts_are_named_when_a_run_starts(two_hosts, digits_task, tmp_path):
    placed = [
        "cluster.placement={rollout: [0], reward: [0], policy: [0, 2, 1, 3]}",
        "cluster.workers=4",
    ]
    fsdp = [
        "trainer.backend=fsdp",
        "trainer.fsdp.shard_size=2",
        "run.steps=1",
        "observe.progress=true",
    ]
    _, out = run_on(
        two_hosts, [*digits_overrides(digits_task, tmp_path), *placed, *fsdp], tmp_path / "apart"
    )
    assert (
        "role 'policy': 2 of its 2 groups of 2 ranks (trainer.fsdp.shard_size) are on several hosts"
        in out
    )
    assert "with its workers in another order in cluster.placement, none would be" in out
