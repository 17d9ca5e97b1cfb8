"""A run whose policy and critic wait in the host's memory while engines generate, also when it
is resumed.
"""

import pytest
from distributed import Client

from siirl_dask.config.file import shipped
from tests.clusters import local_cluster
from tests.e2e import fake_device

SETTINGS = (
    "cluster.workers=2",
    "cluster.placement={}",
    "rollout.engine=transformers",
    "checkpoint.every=2",
)
EXACT = ["row_id", "response_ids", "reward", "old_logprobs", "values", "weights_version"]
SHARDS = ("trainer.backend=fsdp", "critic.backend=fsdp")


@pytest.mark.slow
def test_a_parked_run_is_the_same_to_the_last_bit(train):
    ppo = shipped("quickstart_ppo")
    with local_cluster(2) as cluster, Client(cluster) as client:
        client.run(fake_device.install)

        def start(name, *overrides):
            at = f"cluster.address={cluster.scheduler_address}"
            return train(name, *SETTINGS, *SHARDS, at, *overrides, config_file=ppo)

        steady = start("steady", "run.steps=3")
        park = ("trainer.park=true", "critic.park=true")
        start("parked", "run.steps=2", *park)
        parked = start("parked", "run.steps=3", *park)
        for calls in client.run(fake_device.seen).values():
            assert {"Policy.sleep", "ValueCritic.sleep"} <= {name for name, _, _ in calls}
    for step in (1, 2, 3):
        tables = [run.table("rollouts", step).select(EXACT) for run in (steady, parked)]
        assert tables[0].equals(tables[1]), step
    for expected, got in zip(steady.records(), parked.records(), strict=True):
        for metric in ("policy/loss", "policy/grad_norm", "critic/loss", "critic/grad_norm"):
            assert got["metrics"][metric] == expected["metrics"][metric], metric
