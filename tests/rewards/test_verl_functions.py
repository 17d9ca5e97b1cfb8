"""Reward functions that were written for verl score here as they do there."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device
from siirl_dask.errors import ConfigError
from siirl_dask.rewards import Scorer, by_source, from_verl, weighted_sum
from siirl_dask.rewards.scorer import check_scorer

ROW = {"prompt": "p", "response": "so 3", "answer": "3"}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(ground_truth in solution_str and data_source == "mine")
    return right + extra_info.get("bonus", 0)


def whole(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    return {"score": np.float32(scale), "acc": solution_str == "so 3", "pred": "3", "none": None}


async def judged(solution_str, ground_truth, **kwargs):
    return {"score": 0.5}


def unscored(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]


def test_a_row_is_given_as_verl_gives_it():
    assert from_verl(**ROW, function=compute_score, data_source="mine") == 1.0
    assert from_verl(**ROW, function=compute_score, data_source="other") == 0.0
    more = {"data_source": "mine", "extra_info": {"bonus": 2}}
    assert from_verl(**ROW, function=compute_score, **more) == 3.0


def ends_with_three(data_source, solution_str, ground_truth, extra_info):
    return float(re.search(r"#### 3$", solution_str) is not None)


@pytest.mark.parametrize(
    ("response", "plain", "reward"),
    [("#### 3<|im_end|>", "#### 3", 1.0), ("#### 3", None, 1.0), ("#### 3 ", None, 0.0)],
)
def test_the_solution_has_no_special_token_as_verl_decodes_it(response, plain, reward):
    row = {"prompt": "p", "response": response, "answer": "3", "plain_response": plain}
    assert from_verl(**row, function=ends_with_three) == reward
    both = {"right": partial(from_verl, function=ends_with_three)}
    assert weighted_sum(**row, rewards=both, weights={"right": 2.0})["reward"] == 2 * reward
    assert by_source(**row, data_source="right", rewards=both) == reward


def reads_plain_text(prompt, response, answer, plain_response):
    return float(plain_response is None)


def test_a_function_of_ones_own_reads_the_plain_text_alone_and_in_a_sum():
    rewards = {"plain": reads_plain_text}
    for plain, reward in (("#### 3", 0.0), (None, 1.0)):
        row = {**ROW, "plain_response": plain}
        found = weighted_sum(**row, rewards=rewards, weights={"plain": 1.0})
        assert found["reward"] == by_source(**row, data_source="plain", rewards=rewards) == reward
    scorer = Scorer(reads_plain_text, RewardsConfig(), Device("cpu"))
    assert scorer.named_columns == ("plain_response",)
    options = {"reward": reads_plain_text, "rewards": RewardsConfig()}
    assert check_scorer(options, ["0"], None).columns == frozenset()


def of_retool(data_source, solution_str, ground_truth, extra_info):
    assert extra_info["rollout_reward_scores"] == {}
    return {"score": 1.0, "num_turns": extra_info["num_turns"], **extra_info.get("own", {})}


@pytest.mark.parametrize(
    ("turns", "counted"), [(None, 2), ([{"start": 0}], 2), ([{"start": 0}, {"start": 9}], 4)]
)
def test_the_extra_info_is_a_dict_that_has_what_verl_adds(turns, counted):
    for extra_info in (None, {}, {"own": {"level": 3}}):
        columns = {} if extra_info is None else {"extra_info": extra_info}
        before = repr(columns)
        found = from_verl(**ROW, function=of_retool, turns=turns, **columns)
        assert found["num_turns"] == counted
        assert found.get("level") == (3 if extra_info else None)
        assert repr(columns) == before


def test_the_score_of_a_dict_is_the_reward_and_its_other_numbers_stay():
    given = from_verl(**ROW, function=whole, arguments={"scale": 0.25})
    assert given == {"reward": np.float32(0.25), "acc": True}


@pytest.mark.parametrize(
    ("function", "reward"), [(whole, 1.0), (judged, 0.5), (compute_score, 0.0)]
)
def test_the_scorer_calls_sync_and_async_functions(function, reward):
    scorer = Scorer(partial(from_verl, function=function), RewardsConfig(), Device("cpu"))
    assert [one.reward for one in scorer.score([ROW, ROW])] == [reward, reward]


def test_a_dict_without_a_score_is_a_failure():
    scorer = Scorer(partial(from_verl, function=unscored), RewardsConfig(), Device("cpu"))
    (found,) = scorer.score([ROW])
    assert found.reward is None
    assert "expected the key 'score'" in found.failure


def cost(**options):
    return check_scorer(
        {"reward": partial(from_verl, **options), "rewards": RewardsConfig()}, ["0"], None
    )


def test_the_columns_that_a_function_needs_are_known_before_a_run():
    assert cost(function=whole).columns == {"data_source", "extra_info"}
    assert cost(function=compute_score).columns == {"data_source"}
    assert cost(function=judged).columns == frozenset()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "expected a function, as in"),
        ({"function": "my_reward.py"}, "function='my_reward.py': expected a function"),
        (
            {"function": batched},
            r"batched \(tests/.*:\d+\) does not take ground_truth, solution_str",
        ),
        ({"function": lambda solution_str, ground_truth, model: 1}, "needs model: give it in"),
    ],
)
def test_what_cannot_be_called_as_verl_calls_it_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        cost(**options)


def test_a_reward_of_verls_that_is_given_as_ours_is_told_what_to_write():
    with pytest.raises(ConfigError, match=r"siirl_dask\.rewards:from_verl"):
        check_scorer({"reward": compute_score, "rewards": RewardsConfig()}, ["0"], None)


def rewards_that_yield(prompt, response, answer):
    yield 1.0


def test_a_reward_that_yields_is_refused_before_a_run():
    with pytest.raises(ConfigError, match=r"rewards_that_yield \(tests/.*:\d+\) yields, so a"):
        check_scorer({"reward": rewards_that_yield, "rewards": RewardsConfig()}, ["0"], None)
