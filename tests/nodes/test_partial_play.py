"""Tests of episodes that are played over several steps: none is lost, none differs, each keeps
its environment.
"""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from siirl_storage import commit_parts, stage_part

from siirl_dask.config import EnvironmentsConfig, RolloutConfig, ValidationConfig
from siirl_dask.context import Context, Device, Rank
from siirl_dask.environments import Failure
from siirl_dask.errors import ConfigError, DataError, EpisodeError
from siirl_dask.nodes import play, play_answers
from siirl_dask.nodes.episodes.play import _check_partial_rollout
from siirl_dask.planner.contract import contract_of
from siirl_dask.tables.stored_rows import read_kept_rows
from tests.nodes.test_play import Drawing, table
from tests.nodes.worlds import Echo, ThreadWorld

LENGTH = 24
SAME = ["prompt_ids", "response_ids", "response_mask", "turns", "finish_reason", "reward", "sampling_seed",
        "rollout_logprobs"]  # fmt: skip


def rollout(budget=None, **changes):
    parts = (
        {}
        if budget is None
        else {"partial": True, "max_tokens_per_step": budget, "max_staleness": LENGTH}
    )
    return RolloutConfig(n=2, max_response_length=LENGTH, **parts, **changes)


class Players:
    """A worker that plays some prompts in each step."""

    def __init__(self, budget=None, *, world=None, state=None, version=0, **environments):
        self.engine, self.state = Drawing(version=version), {} if state is None else state
        self.world = world or ThreadWorld(Echo)
        self.options = {
            "rollout": rollout(budget),
            "environments": EnvironmentsConfig(turns=5, **environments),
            "max_prompt_length": 30,
        }

    def context(self, step, *, drain=False):
        resources = {"environments": self.world}
        how = {
            "rank": Rank(),
            "device": Device("w"),
            "resource": self.engine,
            "resources": resources,
        }
        return Context(step=step, run_seed=0, state=self.state, drain=drain, **how)

    def play(self, step, answers, *, drain=False):
        prompts = [f"{step}.{at}" for at in range(len(answers))]
        given = table(answers or ["1"], prompts or ["none"]).slice(0, len(answers))
        rows = play(self.context(step, drain=drain), given, **self.options)
        self.engine.version += 1
        return rows.to_pylist()

    def steps(self, steps):
        return [
            self.play(at, answers, drain=at == len(steps)) for at, answers in enumerate(steps, 1)
        ]


turns = st.lists(st.integers(1, 6).map(str), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(st.lists(turns, min_size=1, max_size=4), st.integers(1, 9), st.sampled_from([None, 2]))
def test_every_episode_equals_one_that_was_played_at_once(steps, budget, turn_tokens):
    parts = Players(budget, turn_tokens=turn_tokens)
    found = parts.steps(steps)
    whole = Players(turn_tokens=turn_tokens).steps(steps)
    by_seed = [
        {row["sampling_seed"]: row for step in rows for row in step} for rows in (found, whole)
    ]
    assert by_seed[0].keys() == by_seed[1].keys()
    for seed, row in by_seed[0].items():
        assert {name: row[name] for name in SAME} == {name: by_seed[1][seed][name] for name in SAME}
    # each environment lived once
    assert parts.world.opened == parts.world.closed == len(by_seed[0])
    assert not parts.state


@settings(max_examples=30, deadline=None)
@given(st.lists(turns, min_size=2, max_size=4), st.integers(1, 9))
def test_a_step_samples_no_more_of_an_episode_than_its_budget_and_gives_whole_groups(steps, budget):
    for step, rows in enumerate(Players(budget).steps(steps), 1):
        assert (
            len({row["row_id"] for row in rows})
            == len({row["episode_id"] for row in rows})
            == len(rows)
        )
        for row in rows:
            begun, own = (
                int(row["prompt"][0]),
                [version for version in row["token_versions"] if version >= 0],
            )
            assert own == [begun - 1 + at // budget for at in range(len(own))] or step == len(steps)
            assert row["weights_version"] == min(own) == begun - 1
            assert [version >= 0 for version in row["token_versions"]] == row["response_mask"]
            siblings = [other for other in rows if other["group_id"] == row["group_id"]]
            assert [other["sample_number"] for other in siblings] == [0, 1]
            assert {other["prompt"] for other in siblings} == {row["prompt"]}
    assert rows


@pytest.mark.parametrize("workers", [1, 2])
def test_after_a_restart_the_episodes_of_kept_groups_begin_again_with_their_seeds(
    tmp_path, workers
):
    first = Players(2)
    ended = first.play(1, ["5", "1", "6", "4"])
    carries = contract_of(partial(play, **first.options)).carries
    packed = carries.pack(first.context(1), **first.options)
    assert 0 < packed.num_rows == 8 - len(ended)
    folder = str(tmp_path / "kept")
    commit_parts(folder, 1, [stage_part(folder, 1, 0, packed)])
    rows = []
    for index in range(workers):
        later = Players(2, version=1)
        share = read_kept_rows(folder, index, workers, 2**20)
        if share is not None:
            carries.unpack(later.context(0), share, **later.options)
        rows += later.play(2, [], drain=True)
        assert later.world.opened == later.world.closed
    stayed = first.play(2, [], drain=True)
    ids = ["row_id", "group_id", "episode_id", "sample_number"]
    by_id = [{row["row_id"]: row for row in some} for some in (rows, stayed)]
    assert by_id[0].keys() == by_id[1].keys()
    for row_id, row in by_id[0].items():
        assert {name: row[name] for name in [*SAME, *ids]} == {
            name: by_id[1][row_id][name] for name in [*SAME, *ids]
        }
        assert {*row["token_versions"]} <= {1, -1}  # all anew
        assert {0, 1} <= {*by_id[1][row_id]["token_versions"]} or len(row["response_ids"]) <= 2


def test_nothing_is_kept_where_all_have_ended_and_other_rows_are_refused():
    players = Players(9)
    players.play(1, ["1"], drain=True)
    carries = contract_of(partial(play, **players.options)).carries
    assert carries.pack(players.context(1), **players.options).num_rows == 0
    with pytest.raises(DataError, match=r"lack .*environment_seed"):
        carries.unpack(players.context(1), table(["1"]), **players.options)
    assert contract_of(partial(play, **Players().options)).carries is None


class FailsLater(Echo):
    def step(self, action):
        return Failure("gave up") if self.turns == 2 else super().step(action)


def test_a_failed_episode_counts_in_the_step_in_which_it_fails_and_the_rest_is_closed():
    allowed = Players(3, world=ThreadWorld(FailsLater, max_failures=8))
    rows = [row for step in allowed.steps([["6", "1"], ["1"], []]) for row in step]
    failed = [row for row in rows if row["finish_reason"] == "failed"]
    assert failed
    assert all(row["reward"] is None for row in failed)
    players = Players(3, world=ThreadWorld(FailsLater))
    with pytest.raises(EpisodeError, match=r"the environment gave up: episode .* of step [23]"):
        players.steps([["6", "1"], ["1"], ["6"], []])
    assert players.world.opened == players.world.closed
    assert not players.state


def test_validation_plays_to_the_end():
    players = Players(2)
    options = {**players.options, "validation": ValidationConfig(n=1)}
    assert play_answers(players.context(1), table(["6", "2"]), **options).num_rows == 2
    assert contract_of(partial(play_answers, **options)).carries is None


@pytest.mark.parametrize(
    ("environments", "words"),
    [
        ({"rows_per_episode": 2}, "rows_per_episode=2"),
        ({"agents": ["a", "b"]}, "per_episode=2"),
        ({"max_open": 9}, "max_open=9"),
    ],
)
def test_what_partial_rollouts_cannot_play_is_refused_by_name(environments, words):
    given_ = {"rollout": rollout(2), "environments": EnvironmentsConfig(**environments)}
    with pytest.raises(ConfigError, match=words):
        _check_partial_rollout(**given_)
    _check_partial_rollout(rollout=rollout(), environments=given_["environments"])
