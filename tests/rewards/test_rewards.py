"""exact_match, and what the scorer accepts as a reward."""

import asyncio
import threading
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, Rank
from siirl_dask.rewards import (
    build_scorer,
    dapo_math,
    exact_match,
    gsm8k,
    math_answer,
    multiple_choice,
)


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
def test_exact_match_ignores_white_space_around_and_nothing_else(response, answer, reward):
    result = exact_match("what?", response, answer)
    assert result == reward
    assert isinstance(result, float)


@given(
    number=st.floats(allow_nan=False, allow_infinity=False),
    other=st.floats(allow_nan=False, allow_infinity=False),
)
def test_exact_match_takes_a_fraction_in_any_digits_and_no_other(number, other):
    for answer in (number, Decimal(str(number))):
        written = [str(number), f" {Decimal(str(number)):f}\n", f"{Decimal(str(number)):e}"]
        assert [exact_match("what?", text, answer) for text in written] == [1.0, 1.0, 1.0]
        assert exact_match("what?", str(other), answer) == float(other == number)
        assert exact_match("what?", f"{number} apples", answer) == 0.0
    assert exact_match("what?", "5", 5.0) == 1.0
    assert exact_match("what?", "5.0", 5) == 0.0


def test_exact_match_takes_a_truth_value_as_json_and_python_write_it():
    assert [exact_match("what?", text, True) for text in ("true", "True", "1", "false")] == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]


def test_a_reward_accepts_extra_columns():
    assert exact_match("p", "r", "r", data_source="gsm8k") == 1.0


def scores_of(function, *responses, **rewards):
    scorer = build_scorer(Device("w"), Rank(), rewards=RewardsConfig(**rewards), reward=function)
    try:
        return scorer.score(
            [{"prompt": "p", "response": response, "answer": ""} for response in responses]
        )
    finally:
        scorer.close()


def numbers(prompt, response, answer):
    return eval(response)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_reward_that_float32_cannot_hold_is_a_failure(processes):
    responses = ["1e39", "-1e39", "10**400", "3e38", "True", "None"]
    scores = scores_of(numbers, *responses, processes=processes, max_failures=4)
    assert [score.reward for score in scores] == [None, None, None, 3e38, 1.0, None]
    assert all(score.failure for score in scores if score.reward is None)


@pytest.mark.parametrize("name", ["mean", "failures", "overlong_penalty"])
def test_a_part_may_not_have_the_name_of_another_metric(name):
    (score,) = scores_of(numbers, f"{{'reward': 1, '{name}': 2}}")
    assert score.reward is None
    assert name in score.failure


async def times_out_by_itself(prompt, response, answer):
    if response == "slow":
        await asyncio.sleep(60)
    raise TimeoutError("the server did not answer")


def test_a_timeout_error_of_the_function_itself_is_reported_as_such():
    line = times_out_by_itself.__code__.co_firstlineno + 3
    raised = (
        f"raised TimeoutError: the server did not answer (tests/rewards/test_rewards.py:{line})"
    )
    assert scores_of(times_out_by_itself, "x")[0].failure == raised
    own, ours = scores_of(times_out_by_itself, "x", "slow", timeout=0.2, max_failures=2)
    assert own.failure == raised
    assert ours.failure == "took more than 0.2 s"


async def cancels_itself(prompt, response, answer):
    raise asyncio.CancelledError


def test_an_async_function_that_is_cancelled_fails_and_leaves_no_row_without_a_score():
    first, second = scores_of(cancels_itself, "a", "b", max_failures=2)
    assert "raised CancelledError" in first.failure
    assert "raised CancelledError" in second.failure


async def gives_its_thread(prompt, response, answer):
    return float(threading.get_ident() % 2**20)


def test_an_async_function_runs_in_a_thread_that_has_the_worker_s_device():
    bound = []
    device = Device("w", bind=lambda: bound.append(threading.get_ident()))
    scorer = build_scorer(device, Rank(), rewards=RewardsConfig(), reward=gives_its_thread)
    (score,) = scorer.score([{"prompt": "p", "response": "r", "answer": "a"}])
    assert [thread % 2**20 for thread in bound] == [score.reward]


async def waits(prompt, response, answer):
    await asyncio.Event().wait()


def test_rows_that_are_cancelled_leave_no_thread():
    before = {*threading.enumerate()}
    scorer = build_scorer(Device("w"), Rank(), rewards=RewardsConfig(), reward=waits)
    scoring = scorer.begin()
    scoring.add(0, lambda: {"prompt": "p", "response": "r", "answer": "a"})
    scoring.cancel()
    scoring.add(1, lambda: {"prompt": "p", "response": "r", "answer": "a"})
    assert scoring.finish() == {}
    assert not {*threading.enumerate()} - before


@pytest.mark.parametrize("reward", [exact_match, gsm8k, dapo_math, math_answer, multiple_choice])
def test_a_row_without_an_answer_is_a_failure_and_no_wrong_response(reward):
    with pytest.raises(ValueError, match="answer"):
        reward(prompt="p", response="None", answer=None)
