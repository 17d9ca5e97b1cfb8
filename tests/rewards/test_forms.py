"""Reward functions in any form: numbers of any library count alike in the worker and in processes,
and all that is async is called on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device
from siirl_dask.rewards import Scorer, from_trl
from tests.rewards.functions import gives_its_own

ROW = {"prompt": "p", "response": "r", "answer": "a"}
NUMBERS = [
    (True, 1.0),
    (np.bool_(True), 1.0),
    (np.float16(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.array(0.5), 0.5),
    (torch.tensor(0.5), 0.5),
    (torch.tensor(True), 1.0),
    (Decimal("0.5"), 0.5),
    (Fraction(1, 2), 0.5),
]
OTHERS = [
    *(None, "1", [1.0], (1.0, {}), {}, {"score": 1.0}, 1 + 0j, 10**400, float("nan")),
    *(np.array([1.0]), np.array([1.0, 2.0]), torch.tensor([1.0]), np.str_("1"), Decimal("sNaN")),
    *(np.array(float("inf")), np.float16("inf"), Decimal("1e39")),
]


def score(function, rows, processes=0, **options):
    scorer = Scorer(function, RewardsConfig(processes=processes, **options), Device("w"))
    try:
        return scorer.score(rows)
    finally:
        scorer.close()


def score_each(values, processes):
    """The scores of rows whose rewards are these values, in one pool of processes."""
    rows = [{**ROW, "answer": str(at)} for at in range(len(values))]
    function = functools.partial(gives_its_own, values=values)
    return score(function, rows, processes, max_failures=len(values))


@pytest.mark.parametrize("processes", [0, 1])
def test_a_number_of_any_library_is_that_number(processes):
    plain = score_each([value for value, _ in NUMBERS], processes)
    parts = score_each([{"reward": value, "part": value} for value, _ in NUMBERS], processes)
    for (value, number), alone, with_part in zip(NUMBERS, plain, parts, strict=True):
        assert (alone.reward, alone.failure) == (number, None), repr(value)
        assert with_part.parts == {"reward": number, "part": number}, repr(value)


@pytest.mark.parametrize("processes", [0, 1])
def test_what_is_no_finite_number_is_a_failure(processes):
    for value, found in zip(OTHERS, score_each(OTHERS, processes), strict=True):
        assert found.reward is None, repr(value)
        assert "gave" in found.failure, repr(value)


def exits(prompt, response, answer):
    sys.exit(3)


async def exits_later(prompt, response, answer):
    exits(prompt, response, answer)


@pytest.mark.parametrize("function", [exits, exits_later])
def test_a_function_that_exits_fails_its_row_and_ends_no_worker(function):
    (found,) = Scorer(function, RewardsConfig(), Device("w")).score([ROW])
    line = exits.__code__.co_firstlineno + 1
    assert found.failure == f"raised SystemExit: 3 (tests/rewards/test_forms.py:{line})"


class Meeting:
    """Counts the calls that wait at once."""

    def __init__(self):
        self.waiting = 0
        self.most = 0

    async def __call__(self, prompt, response, answer, **extra):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0.01)
        self.waiting -= 1
        return 1.0


def wrapped(function):
    @functools.wraps(function)
    def inner(**columns):
        return function(**columns)

    return inner


def of_object(meeting):
    return meeting


def of_decorator(meeting):
    async def function(prompt, response, answer):
        return await meeting(prompt, response, answer)

    return wrapped(function)


def of_options(meeting):
    async def function(prompt, response, answer, *, factor):
        return factor * await meeting(prompt, response, answer)

    return functools.partial(function, factor=1.0)


def of_trl(meeting):
    async def function(prompts, completions, **columns):
        return [await meeting(prompts[0], completions[0], None)]

    return functools.partial(from_trl, functions=[function])


@pytest.mark.parametrize("form", [of_object, of_decorator, of_options, of_trl])
def test_calls_of_all_that_is_async_run_side_by_side_and_may_have_a_timeout(form):
    meeting = Meeting()
    scores = score(form(meeting), [ROW] * 8, timeout=60.0, concurrency=4)
    assert [one.reward for one in scores] == [1.0] * 8
    assert meeting.most == 4


def test_a_decorator_may_answer_for_the_async_function_that_it_wraps():
    async def function(prompt, response, answer):
        raise AssertionError

    function_with_answer = functools.wraps(function)(lambda **columns: 0.5)
    assert [one.reward for one in score(function_with_answer, [ROW])] == [0.5]
