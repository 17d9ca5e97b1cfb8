"""``siirl-dask replay``: nodes run again on a run's stored rows, without the models that they do
not use.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from siirl_storage import open_table

from siirl_dask.cli import main
from siirl_dask.commands.options.steps import steps_between
from siirl_dask.commands.replay import ReplayRequest, render, replay
from siirl_dask.errors import CheckpointError, ConfigError, PlanError, RunError
from siirl_dask.runs.checkpoints import checkpoint_url
from siirl_dask.runs.past_weights import Weights


def long_enough(prompt, response, answer, **extra):
    return float(len(response) > 3)


LONG = f"rewards.function={__name__}:long_enough"


@pytest.fixture
def stored(train, cluster_address):
    """A finished run of three steps, and a replay of its rows on the shared cluster."""
    run = train(
        "run",
        "cluster.workers=2",
        "cluster.placement={}",
        "checkpoint.every=1",
        "checkpoint.keep=3",
    )

    def again(first, **given):
        place = (f"cluster.address={cluster_address}", *given.pop("overrides", ()))
        steps = steps_between(given.pop("steps", ":"))
        return replay(
            ReplayRequest(run=str(run.url), first=first, steps=steps, overrides=place, **given)
        )

    return run, again


def rows(run, table):
    return (
        open_table(f"{run.url}/{table}")
        .to_table()
        .sort_by([("step", "ascending"), ("row_id", "ascending")])
    )


def test_a_changed_reward_has_a_table_of_its_own_and_the_change_is_told(stored):
    run, again = stored
    before = rows(run, "rollouts")
    replayed = again("reward", steps="2:3", settings=[LONG])
    changes = replayed.changes
    assert not replayed.weights, "a changed reward built a model"
    got = rows(run, "replay-1")
    assert got["response_ids"].equals(before.filter(before["step"].to_numpy() > 1)["response_ids"])
    rewards = {True: [], False: []}
    for response, reward in zip(
        got["response"].to_pylist(), got["reward"].to_pylist(), strict=True
    ):
        rewards[len(response) > 3].append(reward)
    assert set(rewards[True]) <= {1.0}
    assert set(rewards[False]) <= {0.0}
    assert rows(run, "rollouts").equals(before), "the run's own rows were touched"
    reward, advantage = changes.columns
    assert (changes.rows, changes.steps, reward.values) == (64, (2, 3), 64)
    assert (reward.name, advantage.name) == ("reward", "advantage")
    assert reward.after == pytest.approx(sum(got["reward"].to_pylist()) / 64)
    assert "in table 'replay-1'" in render(replayed)


def test_nothing_changed_gives_the_same_rows_on_other_workers_and_no_model_is_loaded(
    stored, tmp_path
):
    _, again = stored
    nowhere = [f"model.path={tmp_path}/nowhere"]
    changes = again("reward", overrides=["cluster.workers=3"]).changes
    assert [column.changed for column in changes.columns] == [0, 0]
    assert again("advantage", settings=nowhere).changes.table == "replay-2"
    with pytest.raises((RunError, ConfigError), match="nowhere"):
        again("old_logprobs", settings=nowhere)


def logprobs(run, table):
    values = rows(run, table)
    return {
        step: np.concatenate([one for one, at in zip(*given, strict=True) if at == step])
        for given in [(values["old_logprobs"].to_pylist(), values["step"].to_pylist())]
        for step in sorted(set(values["step"].to_pylist()))
    }


def test_a_model_has_the_weights_of_each_step_or_those_of_the_checkpoint_that_is_named(stored):
    run, again = stored
    trained = logprobs(run, "rollouts")
    own = again("old_logprobs", overrides=["cluster.workers=2"])
    for step, values in logprobs(run, "replay-1").items():
        np.testing.assert_allclose(values, trained[step], atol=1e-5, err_msg=f"step {step}")
    assert [re.sub("=.*", "", text) for text in own.weights] == [
        "policy at step 1: the weights of model.path",
        "policy at step 2: the weights of the checkpoint of step 1",
        "policy at step 3: the weights of the checkpoint of step 2",
    ]
    for choice, same in ((2, [3]), (Weights.NONE, [1]), (Weights.LATEST, [])):
        changes = again("old_logprobs", checkpoint=choice).changes
        got = logprobs(run, changes.table)
        assert [step for step in got if np.allclose(got[step], trained[step], atol=1e-5)] == same, (
            choice
        )


def test_a_checkpoint_that_is_damaged_is_refused_by_name_only_where_a_model_needs_it(stored):
    run, again = stored
    for file in (Path(checkpoint_url(str(run.url), 2)) / "policy").glob("*.distcp"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    assert not again("reward", steps="3").weights
    with pytest.raises(CheckpointError, match=r"step=000002.*has the SHA-256"):
        again("old_logprobs", steps="3")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "--checkpoint=lastest",
            "expected the step of a checkpoint, or one of before, latest, none; .*'latest'",
        ),
        ("--checkpoint=-1", "expected the step of a checkpoint"),
        ("--checkpoint=", "expected the step of a checkpoint"),
        ("--steps=late", "'late': expected A:B or one step"),
        ("--steps=3:2", "the first step comes after the last"),
    ],
)
def test_steps_and_checkpoints_that_are_none_are_refused_before_the_run_is_read(
    tmp_path, option, said, capsys
):
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(tmp_path), "--from", "reward", option])
    assert ended.value.code == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


WRONG = [
    ("reward", {"steps": "7:9"}, r"has saved no step from 7 to 9 \(it has steps 1 to 3\)"),
    (
        "reward",
        {"checkpoint": 7},
        r"--checkpoint 7: .* has no such checkpoint \(it has those of steps 1, 2, 3\)",
    ),
    (
        "reward",
        {"settings": ["data.batch_size=3"]},
        r"it changes nothing: .* do not have data\.batch_size",
    ),
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
