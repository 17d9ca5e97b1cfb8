import asyncio

import pytest

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rewards import build_scorer, exact_match


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("42", "42", 1.0),
        ("  42\n", "42 ", 1.0),
        ("42", 42, 1.0),
        ("4 2", "42", 0.0),
        ("the answer is 42", "42", 0.0),
        ("", "", 1.0),
    ],
)
def test_exact_match_minds_everything_but_white_space_around(response, answer, reward):
    given = exact_match("what?", response, answer)
    assert given == reward
    assert isinstance(given, float)


def test_columns_the_caller_adds_are_accepted():
    assert exact_match("p", "r", "r", data_source="gsm8k") == 1.0


def scores_of(function, *responses, **rewards):
    scorer = build_scorer(Device("w"), Rank(), rewards=RewardsConfig(**rewards), reward=function)
    try:
        return scorer.score([{"prompt": "p", "response": response, "answer": ""} for response in responses])
    finally:
        scorer.close()


def numbers(prompt, response, answer):
    return eval(response)


@pytest.mark.parametrize("processes", [0, 1])
def test_numbers_that_the_column_cannot_hold_are_no_rewards(processes):
    given = scores_of(numbers, "1e39", "-1e39", "10**400", "3e38", "True", "None", processes=processes)
    assert [score.reward for score in given] == [None, None, None, 3e38, 1.0, None]
    assert all(score.failure for score in given if score.reward is None)


@pytest.mark.parametrize("name", ["mean", "failures", "overlong_penalty"])
def test_a_part_cannot_be_named_as_a_metric_that_there_is(name):
    (given,) = scores_of(numbers, f"{{'reward': 1, '{name}': 2}}")
    assert given.reward is None
    assert name in given.failure


async def times_out_by_itself(prompt, response, answer):
    if response == "slow":
        await asyncio.sleep(60)
    raise TimeoutError("the server did not answer")


def test_a_timeout_of_the_functions_own_is_told_as_such():
    assert scores_of(times_out_by_itself, "x")[0].failure == "raised TimeoutError: the server did not answer"
    own, ours = scores_of(times_out_by_itself, "x", "slow", timeout=0.2)
    assert own.failure == "raised TimeoutError: the server did not answer"
    assert ours.failure == "took more than 0.2 s"
