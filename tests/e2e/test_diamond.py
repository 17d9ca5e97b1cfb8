"""Rewards, old log-probs and reference log-probs in parallel on different workers, joined by the
advantage.
"""

import pytest
import yaml

from siirl_dask.config.file import shipped

EXACT = ["row_id", "response", "reward", "advantage"]


def test_the_natural_diamond_gives_the_same_rows_apart_and_on_one_worker(train):
    config = shipped("grpo_kl.yaml")
    apart = train("apart", "run.steps=2", config_file=config)
    one = train(
        "one", "run.steps=2", "cluster.workers=1", "cluster.placement={}", config_file=config
    )
    for step in (1, 2):
        expected, got = one.table("rollouts", step), apart.table("rollouts", step)
        assert got.select(EXACT).equals(expected.select(EXACT))
        for name in ("old_logprobs", "reference_logprobs"):
            flat = [table[name].combine_chunks().flatten().to_pylist() for table in (expected, got)]
            assert flat[1] == pytest.approx(flat[0], abs=1e-4)
    first, second = (apart.table("rollouts", step) for step in (1, 2))
    assert first["reference_logprobs"].to_pylist()[0] == pytest.approx(
        first["old_logprobs"].to_pylist()[0], abs=1e-5
    )
    assert second["reference_logprobs"].to_pylist()[0] != pytest.approx(
        second["old_logprobs"].to_pylist()[0], abs=1e-5
    )
    assert apart.records()[1]["metrics"]["policy/reference_kl"] > 0


def test_a_reference_that_is_a_copy_of_the_policy_follows_it_and_goes_on_where_a_run_stopped(
    train, tmp_path
):
    """The copy is taken after the second step, with an optimizer step for each."""
    config = tmp_path / "average.yaml"
    config.write_text(
        yaml.safe_dump(
            {"base": [str(shipped("quickstart.yaml")), str(shipped("dags/grpo_average.yaml"))]}
        )
    )
    follows = ["trainer.ema_every=2", "algorithm.minibatches=1", "algorithm.kl_coefficient=0.1"]
    settings = [
        *follows,
        "checkpoint.every=2",
        "cluster.workers=2",
        "cluster.placement={rollout: [0], reward: [0], policy: [1]}",
    ]
    straight = train("straight", *settings, "run.steps=4", config_file=config)
    for step in (1, 2, 3, 4):
        table = straight.table("rollouts", step)
        old, reference = (
            table[name].to_pylist() for name in ("old_logprobs", "reference_logprobs")
        )
        assert (old == reference) == (step in (1, 3)), step
    train("resumed", *settings, "run.steps=2", config_file=config)
    resumed = train("resumed", *settings, "run.steps=4", config_file=config)
    for step in (3, 4):
        expected, got = (run.table("rollouts", step) for run in (straight, resumed))
        assert got["reference_logprobs"].to_pylist() == expected["reference_logprobs"].to_pylist()


def test_the_diamond_gives_the_same_numbers_as_the_same_nodes_in_a_chain(train, tmp_path):
    config = shipped("grpo_kl.yaml")
    chain = tmp_path / "chain.yaml"
    after = {
        "old_logprobs": "reward",
        "reference_logprobs": "old_logprobs",
        "advantage": "reference_logprobs",
    }
    chain.write_text(
        yaml.safe_dump(
            {"base": str(config), "nodes": {node: {"after": it} for node, it in after.items()}}
        )
    )
    runs = [
        train(name, "run.steps=2", config_file=file)
        for name, file in {"diamond": config, "chain": chain}.items()
    ]
    for step in (1, 2):
        diamond, in_chain = (run.table("rollouts", step) for run in runs)
        assert in_chain.select(EXACT).equals(diamond.select(EXACT))
        for name in ("old_logprobs", "reference_logprobs"):
            flat = [
                table[name].combine_chunks().flatten().to_pylist() for table in (diamond, in_chain)
            ]
            assert flat[1] == pytest.approx(flat[0], abs=1e-5)
    for expected, got in zip(*(run.records() for run in runs), strict=True):
        assert got["metrics"]["policy/loss"] == pytest.approx(
            expected["metrics"]["policy/loss"], abs=1e-5
        )
        assert got["metrics"]["policy/grad_norm"] == pytest.approx(
            expected["metrics"]["policy/grad_norm"], rel=1e-3
        )
