"""A model in shards over workers learns what one does that is whole on each."""

import pytest

from siirl_dask.config.file import shipped

APART = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [2, 3], critic: [0, 1, 2, 3]}"
HSDP = "cluster.placement={rollout: [0, 1], reward: [0, 1], policy: [0, 1, 2, 3], critic: [2, 3]}"
"""Workers are in different numbers of roles, and so of process groups: none may wait for a group
of others."""


def test_policy_and_critic_in_shards_learn_as_whole_ones_do(train):
    ppo = shipped("quickstart_ppo")
    whole = train("whole", APART, config_file=ppo)
    sharded = ["trainer.backend=fsdp", "trainer.fsdp.shard_size=2", "critic.backend=fsdp"]
    shards = train("shards", HSDP, *sharded, config_file=ppo)
    for expected, got in zip(whole.records(), shards.records(), strict=True):
        for metric in ("policy/loss", "critic/loss", "policy/entropy", "reward/mean"):
            assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], abs=1e-5), (
                metric
            )
