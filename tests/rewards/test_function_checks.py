"""A reward function that cannot be used is refused before a run, with its file and line; one that
fails says where in the user's own code.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siirl_dask.commands.plan import describe_run
from siirl_dask.config import RewardsConfig
from siirl_dask.config.file import load_config_file, shipped
from siirl_dask.context import Device
from siirl_dask.driver.phases import dags
from siirl_dask.errors import ConfigError, PlanError
from siirl_dask.rewards import Scorer, by_source, from_trl, from_verl, weighted_sum
from siirl_dask.rewards.scorer import check_scorer

ROW = {"prompt": "p", "response": "r", "answer": "a"}
HERE = "tests/rewards/test_function_checks.py"


def check(reward, **settings):
    rewards = RewardsConfig(**settings)
    return check_scorer({"reward": reward, "rewards": rewards}, ["0"], None).columns


def score(reward, processes=0):
    scorer = Scorer(reward, RewardsConfig(processes=processes), Device("w"))
    try:
        (found,) = scorer.score([ROW])
        return found
    finally:
        scorer.close()


def line_of(function, after=0):
    return f"{HERE}:{inspect.unwrap(function).__code__.co_firstlineno + after}"


def right(prompt, response, answer):
    return 1.0


async def right_later(prompt, response, answer):
    await asyncio.sleep(0)
    return {"reward": 1.0, "length": 2}


def with_level(prompt, response, answer, level):
    return level


def without_answer(prompt, response):
    return 1.0


def by_position(prompt, response, answer, /):
    return 1.0


def yields(prompt, response, answer):
    yield 1.0


def of_trl(prompts, completions, **columns):
    return [1.0]


def of_verl(data_source, solution_str, ground_truth):
    return 1.0


class Judge:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, prompt, response, answer):
        return self.scale


UNUSABLE = [without_answer, by_position, yields, of_trl, of_verl]


@pytest.mark.parametrize("function", UNUSABLE)
def test_a_function_that_cannot_be_called_is_refused_with_its_line(function):
    place = re.escape(f"{function.__name__} ({line_of(function)})")
    with pytest.raises(ConfigError, match=f"rewards.function: {place}"):
        check(function)
    inner = partial(weighted_sum, rewards={"part": function}, weights={"part": 1.0})
    with pytest.raises(ConfigError, match=rf"rewards.options.rewards.part: {place}"):
        check(inner)


@pytest.mark.parametrize("function", [without_answer, by_position])
def test_a_function_of_trl_or_verl_is_refused_with_its_line(function):
    place = re.escape(f"{function.__name__} ({line_of(function)})")
    with pytest.raises(ConfigError, match=place):
        check(partial(from_trl, functions=[function]))
    with pytest.raises(ConfigError, match=place):
        check(partial(from_verl, function=function))


@pytest.mark.parametrize("reward", [None, 1.0, "exact_match", [right], Judge])
def test_what_is_no_function_is_refused(reward):
    with pytest.raises(ConfigError, match=r"rewards\.function: .*(is no function|is a class)"):
        check(reward)


def test_a_weighted_sum_needs_the_columns_of_its_rewards():
    rewards = {"right": right, "level": with_level}
    summed = partial(weighted_sum, rewards=rewards, weights={"right": 1.0, "level": 0.5})
    assert check(summed) == {"level"}


@pytest.mark.parametrize("processes", [0, 1])
def test_a_weighted_sum_takes_async_functions(processes):
    rewards = {"right": right, "later": right_later}
    summed = partial(weighted_sum, rewards=rewards, weights={"right": 1.0, "later": 0.5})
    found = score(summed, processes)
    assert found.parts == {"reward": 1.5, "right": 1.0, "later": 1.0, "later/length": 2.0}


@dataclass
class OfTrl:
    """A dataclass has no hash."""

    scale: float

    def __call__(self, prompts, completions, **columns):
        return [self.scale for _ in prompts]


def test_a_reward_of_trl_may_be_any_object():
    assert score(partial(from_trl, functions=[OfTrl(0.5)])).reward == 0.5


WEIGHTS = st.one_of(
    st.none(), st.text(), st.floats(), st.booleans(), st.lists(st.floats(), max_size=3)
)


@given(weight=WEIGHTS)
def test_whatever_stands_as_a_weight_is_refused_or_adds_up(weight):
    summed = partial(weighted_sum, rewards={"right": right}, weights={"right": weight})
    trl = partial(from_trl, functions=[of_trl], weights=[weight])
    for reward in (summed, trl):
        if type(weight) is float and math.isfinite(weight):
            check(reward)
            assert reward(**ROW)["reward"] == weight
        else:
            with pytest.raises(ConfigError, match="is no finite number"):
                check(reward)


GIVEN = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
    st.lists(st.one_of(st.floats(), st.text(max_size=2), st.none()), max_size=2),
)


@given(value=GIVEN)
def test_whatever_a_reward_of_trl_gives_is_a_number_or_a_failure_that_names_it(value):
    def names_itself(prompts, completions):
        return value

    found = score(partial(from_trl, functions=[names_itself]))
    if found.failure is None:
        assert found.reward == float(value[0])
        assert not isinstance(value[0], str)
    else:
        assert "names_itself" in found.failure or "gave" in found.failure


def reads_json(prompt, response, answer):
    return json.loads("{")["reward"]


def asserts(prompt, response, answer):
    assert response == answer


async def asserts_later(prompt, response, answer):
    await asyncio.sleep(0)
    asserts(prompt, response, answer)


def calls_another(prompt, response, answer):
    return asserts(prompt, response, answer)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_failure_names_the_line_of_the_users_own_code(processes):
    assert score(reads_json, processes).failure.endswith(f"({line_of(reads_json, 1)})")
    for function in (asserts, asserts_later, calls_another):
        found = score(function, processes).failure
        assert found.startswith("raised AssertionError")
        assert found.endswith(f"({line_of(asserts, 1)})")


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")

    __repr__ = __str__


def raises_it(prompt, response, answer):
    raise Unspeakable


def returns_it(prompt, response, answer):
    return Unspeakable()


def named_by_it(prompt, response, answer):
    return {"reward": 1.0, Unspeakable(): 1.0}


def named_by_half_a_character(prompt, response, answer):
    return {"reward": 1.0, "\ud800": 1.0}


def very_large(prompt, response, answer):
    return 10**5000


def very_long(prompt, response, answer):
    return "x" * 10**6


def says_much(prompt, response, answer):
    raise ValueError("\ud800" * 10**6)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    "function",
    [
        *(raises_it, returns_it, named_by_it, named_by_half_a_character),
        *(very_large, very_long, says_much),
    ],
)
def test_a_failure_is_a_short_text_whatever_the_function_gives(function, processes):
    found = score(function, processes)
    assert found.reward is None
    assert len(found.failure.encode()) < 2000


def test_a_timeout_that_nothing_keeps_is_refused_before_a_run():
    with pytest.raises(ConfigError, match=r"rewards.timeout=5 needs rewards.processes"):
        check(right, timeout=5.0)
    check(right, timeout=5.0, processes=1)
    check(right_later, timeout=5.0)


def plan(overrides):
    file = load_config_file(shipped("quickstart"), overrides)
    return describe_run(file.config, *dags(file))


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("lambda prompt, response, answer: 1.0", "is a lambda or a nested function"),
        ("Judge()", r"Judge \(.*mine.py:2\) is not a module-level function"),
        ("Judge().__call__", "is a method or a nested class"),
        ("3", r"has no function 'reward', which is of type int"),
    ],
)
def test_a_plan_refuses_what_a_run_cannot_write_down(reward, said, tmp_path):
    judge = "class Judge:\n    def __call__(self, prompt, response, answer):\n        return 1.0\n"
    (tmp_path / "mine.py").write_text(f"{judge}\n\nreward = {reward}\n")
    given = [f"rewards.function={tmp_path}/mine.py:reward", "data.prepare=null"]
    given += [f"run.url={tmp_path}/run", f"model.path={tmp_path}/model", f"data.url={tmp_path}/no"]
    with pytest.raises((ConfigError, PlanError), match=said):
        plan(given)


def test_rewards_by_source_are_checked_and_called_each_as_it_is():
    """Columns are those of all, and async ones are awaited beside others."""
    rewards = {"numbers": with_level, "words": right_later}
    reward = partial(by_source, rewards=rewards)
    assert check(reward) == {"data_source", "level"}
    scorer = Scorer(reward, RewardsConfig(), Device("w"))
    try:
        rows = [{**ROW, "data_source": "numbers", "level": 3}, {**ROW, "data_source": "words"}]
        found = scorer.score([{"level": 0, **row} for row in rows])
        assert [each.reward for each in found] == [3.0, 1.0]
    finally:
        scorer.close()
    with pytest.raises(ConfigError, match="does not take answer"):
        check(partial(by_source, rewards={"numbers": without_answer}))
    with pytest.raises(ConfigError, match="a reward for each data_source"):
        check(partial(by_source, rewards={}))


def test_each_reward_of_a_sum_gets_what_it_takes_of_the_columns_of_all():
    rewards = {"level": with_level, "right": right}
    reward = partial(weighted_sum, rewards=rewards, weights={"level": 2.0, "right": 0.5})
    assert check(reward) == {"level"}
    assert reward(**ROW, level=3)["reward"] == 6.5
