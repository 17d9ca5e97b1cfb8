"""Runs over episodes of several turns: their rows are the same on any workers, whenever
environments answer.
"""

from __future__ import annotations

import signal

import numpy as np
import pyarrow.compute as pc
import pytest

from siirl_dask.config.file import shipped
from siirl_dask.errors import EpisodeError, RunError
from tests.e2e.test_replay import failing

TURNS = shipped("quickstart_turns.yaml")
LOGPROBS = ("rollout_logprobs", "old_logprobs")
PER_RUN = {"worker", "old_logprobs", "rollout_logprobs"}
SMALL = (
    "rollout.max_response_length=24",
    "environments.turn_tokens=4",
    "environments.turns=4",
    "trainer.lr=1e-3",
)


def of(environment, *overrides):
    return (*SMALL, f"environments.environment=tests.e2e.worlds:{environment}", *overrides)


def flat(table, column):
    return table[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)


def check_equal(expected, got, step):
    left, right = expected.table("rollouts", step), got.table("rollouts", step)
    exact = [name for name in left.column_names if name not in PER_RUN]
    for name in exact:
        assert right[name].equals(left[name]), (step, name)
    for column in LOGPROBS:
        assert np.abs(flat(left, column) - flat(right, column)).max(initial=0) < 1e-4, (
            step,
            column,
        )
    return left


def test_rows_are_the_same_on_one_worker_and_two_and_logprobs_are_the_trainers(train):
    """The second run has fewer rows in its engines' batches, fewer open episodes, and takes
    episodes over.
    """
    one = train("one", *of("Delayed"), "cluster.workers=1", "run.steps=2", config_file=TURNS)
    crowded = ("cluster.workers=2", "rollout.max_rows=3", "environments.max_open=5", "run.steps=2")
    two = train("two", *of("Delayed"), *crowded, config_file=TURNS)
    for step in (1, 2):
        rows = check_equal(one, two, step)
        mask = flat(rows, "response_mask").astype(bool)
        sampled, trained = (flat(rows, column) for column in LOGPROBS)
        assert np.abs(sampled - trained)[mask].max() < 1e-5
        assert not sampled[~mask].any()
        assert 0 < (~mask).sum() < mask.sum()
        lengths = pc.list_value_length(rows["turns"]).to_numpy()
        assert {2, 3} <= {*lengths}
        assert rows["reward"].to_numpy() == pytest.approx(
            [sum(turn["reward"] for turn in turns) for turns in rows["turns"].to_pylist()]
        )
    assert two.records()[0]["metrics"]["environments/most_open"] <= 5


PLACES = {"four": "{}", "apart": "{rollout: [0, 1], environments: [0, 1], policy: [2, 3]}"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "more", "where"),
    [
        pytest.param("Delayed", (), (*PLACES,), marks=pytest.mark.sweep),
        pytest.param(
            "Rewritten", ("environments.rows_per_episode=3",), (*PLACES,), marks=pytest.mark.sweep
        ),
        ("Talking", ("environments.agents=[a, b]",), ("apart",)),
        ("Broken", ("environments.max_failures=80",), ("four",)),
    ],
)
def test_rows_are_the_same_on_four_workers_and_in_other_placements(train, environment, more, where):
    one = train("one", *of(environment, *more), "cluster.workers=1", config_file=TURNS)
    for name in where:
        given = (
            "cluster.workers=4",
            f"cluster.placement={PLACES[name]}",
            "environments.max_open=3",
            "rollout.max_rows=2",
        )
        other = train(name, *of(environment, *more, *given), config_file=TURNS)
        for step in (1, 2, 3):
            rows = check_equal(one, other, step)
        for expected, got in zip(one.records(), other.records(), strict=True):
            for metric in ("policy/loss", "reward/mean", "episodes/turns", "episodes/failed"):
                assert got["metrics"][metric] == pytest.approx(
                    expected["metrics"][metric], abs=1e-5
                ), (name, metric)
    if environment == "Rewritten":
        assert {*rows["segment"].to_pylist()} == {0, 1}
    if environment == "Talking":
        assert {*rows["agent"].to_pylist()} == {"a", "b"}
    if environment == "Broken":
        failed = pc.equal(rows["finish_reason"], "failed")
        assert 0 < pc.sum(failed).as_py() < rows.num_rows
        assert rows["reward"].is_null().equals(failed)
        assert 0 in pc.list_value_length(rows["response_ids"]).to_pylist()


PARTS = ("run.steps=5", "rollout.partial=true", "rollout.max_tokens_per_step=5", "rollout.max_staleness=4",
         "data.batch_size=6", "rollout.max_rows=3", "checkpoint.every=5")  # fmt: skip
APART = "cluster.placement={rollout: [0], environments: [0], policy: [1]}"


def versions_of(rows):
    return [
        {version for version in row if version >= 0} for row in rows["token_versions"].to_pylist()
    ]


@pytest.mark.slow
def test_long_episodes_go_on_in_the_next_step_with_their_environments_on_any_workers(train):
    one = train("one", *of("Delayed", *PARTS), "cluster.workers=2", APART, config_file=TURNS)
    places = "cluster.placement={rollout: [0, 1], environments: [0, 1], policy: [2, 3]}"
    two = train("two", *of("Delayed", *PARTS), "cluster.workers=4", places, config_file=TURNS)
    seeds, spans = [], []
    for step in range(1, 6):
        rows = check_equal(one, two, step)
        seeds += rows["sampling_seed"].to_pylist()
        spans += [len(own) for own in versions_of(rows)]
    assert len(seeds) == len({*seeds}) == 5 * 6 * 4
    assert {1, 2, 3} <= {*spans}, {*spans}
    assert one.records()[0]["metrics"]["rollout/kept_for_next_step"] > 0


@pytest.mark.slow
def test_after_a_failure_kept_episodes_begin_again_and_none_is_lost(train, tmp_path):
    def change(dag):
        return failing(dag, tmp_path / "run")

    given = (
        *of("Delayed", *PARTS),
        "rollout.steps_ahead=0",
        "cluster.workers=1",
        "cluster.placement={}",
    )
    (tmp_path / "run-failed").touch()
    straight = train("straight", *given, config_file=TURNS, change=change)
    (tmp_path / "run-failed").unlink()
    with pytest.raises(RunError, match="the plug was pulled"):
        train("run", *given, config_file=TURNS, change=change)
    resumed = train("run", *given, config_file=TURNS, change=change)
    for step in range(1, 5):
        check_equal(straight, resumed, step)
    rows, expected = (run.table("rollouts", 5) for run in (resumed, straight))
    assert {*rows["sampling_seed"].to_pylist()} == {*expected["sampling_seed"].to_pylist()}
    older = [at for at, own in enumerate(versions_of(expected)) if len(own) > 1]
    assert older
    again = versions_of(rows)
    assert all(len(again[at]) == 1 for at in older)  # of the latest weights alone


VLLM = ("rollout.engine=vllm", "rollout.vllm.kv_cache_memory=16MiB")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_vllm_plays_the_episodes_of_transformers_and_the_same_on_several_workers(train, workers):
    """As many rows as episodes in one, a few in the others."""
    pytest.importorskip("vllm")

    def play(name, *more):
        return train(name, *of("Delayed", "run.steps=2", *more), config_file=TURNS)

    expected = play("transformers", "cluster.workers=1", "rollout.max_rows=64")
    crowded = ("cluster.placement={}", "rollout.max_rows=3", "environments.max_open=5")
    others = [
        play("one", *VLLM, "cluster.workers=1", "rollout.max_rows=5"),
        play("more", *VLLM, f"cluster.workers={workers}", *crowded),
    ]
    for step in (1, 2):
        for other in others:
            check_equal(expected, other, step)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_vllm_goes_on_with_episodes_in_later_steps_as_transformers_does(train):
    """On two workers in one run, on one in the other."""
    pytest.importorskip("vllm")
    places = "cluster.placement={rollout: [0, 1], environments: [0, 1], policy: [2]}"
    vllm = (*VLLM, "cluster.workers=3", places)
    one = train(
        "transformers", *of("Delayed", *PARTS), "cluster.workers=2", APART, config_file=TURNS
    )
    two = train("vllm", *of("Delayed", *PARTS, *vllm), config_file=TURNS)
    spans = []
    for step in range(1, 6):
        rows = check_equal(one, two, step)
        assert two.table("rollouts", step)["token_versions"].equals(rows["token_versions"])
        spans += [len(own) for own in versions_of(rows)]
    assert {1, 2} <= {*spans}
    assert two.records()[0]["metrics"]["rollout/kept_for_next_step"] > 0


def test_more_failed_episodes_than_allowed_end_the_run_with_their_reason(train):
    with pytest.raises(
        EpisodeError, match=r"raised ValueError: no luck.*environments\.max_failures=1"
    ):
        train(
            "broken",
            *of("Broken", "environments.max_failures=1"),
            "cluster.workers=2",
            config_file=TURNS,
        )


@pytest.mark.slow
def test_ctrl_c_ends_a_run_in_which_500_episodes_wait(start):
    """``end`` fails for any process that is left over."""
    given = ("data.batch_size=64", "rollout.n=8", "environments.max_open=600", "cluster.workers=1")
    run = start(*of("Waiting", *given), config=TURNS)
    run.wait_until(lambda: (run.url / "metrics.jsonl").exists() or (run.url / "attempts").exists())
    run.process.send_signal(signal.SIGINT)
    seconds, _, _ = run.end(timeout=60)
    assert seconds < 30 * run.slowdown
