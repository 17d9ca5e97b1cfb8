"""The same run on any number of workers and in any placement: what design section 4 promises."""

import pytest

from siirl_dask.config.file import shipped

PLACEMENTS = {
    "1": (1, "{}"),
    "2 colocated": (2, "{}"),
    "4 colocated": (4, "{}"),
    "split 2+2": (4, "{rollout: [0, 1], policy: [2, 3]}"),
    "2 to 4": (4, "{rollout: [0, 1], policy: [0, 1, 2, 3]}"),
}
EXACT = [
    "row_id",
    "group_id",
    "prompt",
    "prompt_ids",
    "response_ids",
    "response",
    "reward",
    "advantage",
    "weights_version",
    "prompt_number",
    "data_part",
    "data_row",
    "sample_number",
    "sampling_seed",
]


@pytest.fixture
def runs(train):
    def start(name):
        workers, placement = PLACEMENTS[name]
        return train(name, f"cluster.workers={workers}", f"cluster.placement={placement}")

    return {name: start(name) for name in PLACEMENTS}


def test_rows_are_the_same_in_every_placement_and_losses_to_1e5(runs):
    one = runs.pop("1")
    for name, other in runs.items():
        for step in (1, 2, 3):
            expected, got = one.table("rollouts", step), other.table("rollouts", step)
            assert got.select(EXACT).equals(expected.select(EXACT)), (name, step)
            for column in ("rollout_logprobs", "old_logprobs"):
                flat = [
                    table[column].combine_chunks().flatten().to_pylist()
                    for table in (expected, got)
                ]
                assert flat[1] == pytest.approx(flat[0], abs=1e-4), (name, step, column)
        for expected, got in zip(one.records(), other.records(), strict=True):
            for metric in ("policy/loss", "policy/entropy", "reward/mean"):
                assert got["metrics"][metric] == pytest.approx(
                    expected["metrics"][metric], abs=1e-5
                ), (name, metric)


@pytest.mark.parametrize(
    "config", ["quickstart_ppo", "quickstart_dapo", "quickstart_reinforce_plus_plus"]
)
def test_what_is_decided_over_all_workers_is_the_same_on_one(config, train):
    """A critic beside the policy, whitened advantages, groups that are replaced."""
    roles = ["rollout", "reward", "policy", "critic"][: 4 if config == "quickstart_ppo" else 3]
    apart = {role: [0, 1, 2] if role in ("rollout", "reward") else [2, 3] for role in roles}
    places = {"one": ("1", "{}"), "apart": ("4", str(apart).replace("'", ""))}
    one, other = (
        train(
            name,
            f"cluster.workers={workers}",
            f"cluster.placement={placement}",
            config_file=shipped(config),
        )
        for name, (workers, placement) in places.items()
    )
    exact = ["row_id", "group_id", "prompt", "response_ids", "reward"]
    for step in (1, 2, 3):
        expected, got = one.table("rollouts", step), other.table("rollouts", step)
        assert got.select(exact).equals(expected.select(exact)), step
        for column in {"advantages", "returns", "values"} & set(expected.column_names):
            flat = [
                table[column].combine_chunks().flatten().to_pylist() for table in (expected, got)
            ]
            assert flat[1] == pytest.approx(flat[0], abs=1e-4), (step, column)
    for expected, got in zip(one.records(), other.records(), strict=True):
        for metric in {"policy/loss", "critic/loss", "data/drawn_prompts"} & set(
            expected["metrics"]
        ):
            assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], abs=1e-5), (
                metric
            )
