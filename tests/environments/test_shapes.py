"""Environments of others' libraries, taken by their shape; with the libraries themselves where
they are installed.
"""

from functools import partial

import pytest

from siirl_dask.environments import Failure, Opening, Step
from siirl_dask.environments.shapes import UnknownShape, shape_of
from tests.environments import worlds

CHAT = [{"role": "user", "content": "play"}]


@pytest.fixture(params=[{}, {"processes": 1}], ids=["worker", "processes"])
def way(request):
    return request.param


def test_gymnasium_s_shape_takes_the_last_number_of_a_turn_and_says_what_it_expected(play, way):
    player = play(worlds.Cart, **way)
    assert player.reset(prompt=CHAT, answer="2", seed=3) == Opening(
        prompt=[{"role": "user", "content": "play0"}], tools=[]
    )
    assert player.step("I go 1") == Step(observation="1")
    assert player.step("up") == Step(observation="expected a whole number from 0 to 1")
    assert player.step("2") == Step(observation="expected a whole number from 0 to 1")
    assert player.step("not 0 but 1") == Step(observation="2", reward=1.0, done=True)


def test_actions_that_cannot_be_texts_are_refused(play, way):
    player = play(partial(worlds.Cart, space="Box"), **way)
    answer = player.reset(answer="2")
    assert "which are no texts: expected a space of Text or Discrete" in answer.reason
    assert "0x7" not in answer.reason


def test_skyrl_gym_s_shape_gets_the_row_as_its_extras(play, way):
    player = play(worlds.Chat, **way)
    assert player.reset(prompt="say a", answer="a").prompt == [
        {"role": "user", "content": "say a"},
        {"role": "user", "content": "go"},
    ]
    assert player.step("b") == Step(observation=[{"role": "user", "content": "again"}])
    assert player.step("a") == Step(reward=1.0, done=True)


def test_several_environments_are_chosen_by_a_column(play, way):
    player = play(by_name={"guess": worlds.Guess, "shop": worlds.Shop}, name_column="which", **way)
    assert player.reset(0, which="guess", answer="5").prompt == "guess, p"
    assert player.reset(1, which="shop").prompt == "p There are 0."
    assert player.reset(2, which="chess") == Failure(
        "its column 'which' is 'chess': expected one of ['guess', 'shop']"
    )
    assert player.step("5", 0).reward == 1.0


def test_a_factory_makes_an_environment_for_each_episode(play, way):
    player = play(worlds.made_by_a_function, **way)
    player.reset(0, answer="1")
    player.reset(1, answer="9")
    assert [player.step("5", 0).observation, player.step("5", 1).observation] == ["<", ">"]


def test_none_as_an_opening_is_the_row_s_own_prompt(play):
    assert play(worlds.Guess).reset(prompt="own", answer="1") == Opening(tools=[])


def test_an_environment_gets_the_columns_that_are_configured_and_no_others(play):
    player = play(worlds.Shop, columns=["stock"])
    assert player.reset(prompt="p", stock=3, other=4).prompt == " There are 3."


@pytest.mark.parametrize("thing", [object(), [], "text", dict, worlds.opens_with_everything])
def test_what_is_no_environment_is_named(thing):
    with pytest.raises(UnknownShape, match="has no reset"):
        shape_of(thing)


def test_gymnasium_itself(play, way):
    pytest.importorskip("gymnasium")
    player = play(worlds.frozen_lake, **way)
    assert player.reset(prompt="Walk.", seed=1).prompt == "Walk.0"
    steps = [player.step(turn) for turn in ("1", "1", "2", "2", "1", "2")]
    assert [step.observation for step in steps] == ["4", "8", "9", "10", "14", "15"]
    assert steps[-1] == Step(observation="15", reward=1.0, done=True)


def test_skyrl_gym_itself(play, way):
    pytest.importorskip("skyrl_gym")
    player = play(worlds.skyrl_environment(), **way)
    opening = player.reset(prompt=CHAT, answer="4")
    assert opening.prompt == CHAT
    assert player.step("it is #### 4") == Step(reward=1.0, done=True)
