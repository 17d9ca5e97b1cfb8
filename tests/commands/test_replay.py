"""``siirl-dask replay``: nodes run again on a run's stored rows, without the models that they do not use."""

import pytest
from siirl_storage import open_table

from siirl_dask.commands.replay import ReplayRequest, render, replay
from siirl_dask.errors import ConfigError, PlanError, RunError


def long_enough(prompt, response, answer, **extra):
    return float(len(response) > 3)


LONG = f"rewards.function={__name__}:long_enough"


@pytest.fixture
def stored(train, cluster_address):
    """A finished run of three steps, and a replay of its rows on the shared cluster."""
    run = train("run", "cluster.workers=2", "cluster.placement={}", "checkpoint.every=0")

    def again(first, **given):
        place = (f"cluster.address={cluster_address}", *given.pop("overrides", ()))
        return replay(ReplayRequest(run=str(run.url), first=first, overrides=place, **given))

    return run, again


def rows(run, table):
    return open_table(f"{run.url}/{table}").to_table().sort_by([("step", "ascending"), ("row_id", "ascending")])


def test_a_changed_reward_has_a_table_of_its_own_and_the_change_is_told(stored):
    run, again = stored
    before = rows(run, "rollouts")
    changes = again("reward", steps="2:3", settings=[LONG])
    got = rows(run, "replay-1")
    assert got["response_ids"].equals(before.filter(before["step"].to_numpy() > 1)["response_ids"])
    rewards = {True: [], False: []}
    for response, reward in zip(got["response"].to_pylist(), got["reward"].to_pylist(), strict=True):
        rewards[len(response) > 3].append(reward)
    assert set(rewards[True]) <= {1.0}
    assert set(rewards[False]) <= {0.0}
    assert rows(run, "rollouts").equals(before), "the run's own rows were touched"
    reward, advantage = changes.columns
    assert (changes.rows, changes.steps, reward.values) == (64, (2, 3), 64)
    assert (reward.name, advantage.name) == ("reward", "advantage")
    assert reward.after == pytest.approx(sum(got["reward"].to_pylist()) / 64)
    assert "in table 'replay-1'" in render(changes)


def test_nothing_changed_gives_the_same_rows_on_other_workers_and_no_model_is_loaded(stored, tmp_path):
    _, again = stored
    nowhere = [f"model.path={tmp_path}/nowhere"]
    changes = again("reward", overrides=["cluster.workers=3"])
    assert [column.changed for column in changes.columns] == [0, 0]
    assert again("advantage", settings=nowhere).table == "replay-2"
    with pytest.raises((RunError, ConfigError), match="nowhere"):
        again("old_logprobs", settings=nowhere)


WRONG = [
    ("reward", {"steps": "7:9"}, r"has no stored rows of these (steps )?\(it has steps 1 to 3\)"),
    ("reward", {"steps": "late"}, "--steps 'late': expected A:B"),
    ("reward", {"settings": ["data.batch_size=3"]}, r"it changes nothing: .* do not have data\.batch_size"),
    ("reward", {"settings": ["rewards.functoin=x:y"]}, "did you mean 'function'"),
    ("reward", {"nodes": ["rewrad=x:y"]}, "did you mean 'reward'"),
    ("rollout", {}, "node 'rollout' makes rows of its own"),
    ("update", {}, "no rows are saved at node 'update' or after it"),
]


def test_a_wrong_request_is_refused_before_anything_starts(stored):
    run, again = stored
    for first, given, message in WRONG:
        with pytest.raises((ConfigError, PlanError), match=message):
            again(first, **given)
    assert not (run.url / "replay-1").exists()
