"""Reward functions that were written for verl score here as they do there."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device
from siirl_dask.errors import ConfigError
from siirl_dask.rewards import Scorer, from_verl
from siirl_dask.rewards.scorer import check_scorer

ROW = {"prompt": "p", "response": "so 3", "answer": "3"}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(ground_truth in solution_str and data_source == "mine")
    return right + (0 if extra_info is None else extra_info["bonus"])


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
