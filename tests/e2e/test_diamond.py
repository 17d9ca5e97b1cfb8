"""Rewards, old log-probs and reference log-probs in parallel on different workers, joined by the advantage."""

import pytest

from siirl_dask.configfile import shipped

EXACT = ["row_id", "response", "reward", "advantage"]


def test_the_natural_diamond_gives_the_same_rows_apart_and_on_one_worker(train):
    config = shipped("grpo_kl.yaml")
    apart = train("apart", "run.steps=2", config_file=config)
    one = train("one", "run.steps=2", "cluster.workers=1", "cluster.placement={}", config_file=config)
    for step in (1, 2):
        expected, got = one.table("rollouts", step), apart.table("rollouts", step)
        assert got.select(EXACT).equals(expected.select(EXACT))
        for name in ("old_logprobs", "reference_logprobs"):
            flat = [table[name].combine_chunks().flatten().to_pylist() for table in (expected, got)]
            assert flat[1] == pytest.approx(flat[0], abs=1e-4)
    first, second = (apart.table("rollouts", step) for step in (1, 2))
    assert first["reference_logprobs"].to_pylist()[0] == pytest.approx(first["old_logprobs"].to_pylist()[0], abs=1e-5)
    assert second["reference_logprobs"].to_pylist()[0] != pytest.approx(second["old_logprobs"].to_pylist()[0], abs=1e-5)
    assert apart.records()[1]["metrics"]["policy/reference_kl"] > 0
