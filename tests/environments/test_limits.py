"""The limit of open environments holds whatever is opened, closed and failed, in whatever order."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.config import EnvironmentsConfig
from siirl_dask.environments import Opening, Step
from siirl_dask.errors import ConfigError
from siirl_dask.testing.environments import Answers, action
from tests.environments.conftest import built


class Counted:
    """An environment that counts how many of it are open at once."""

    now = most = calls = 0

    def __init__(self):
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)

    async def reset(self, row, seed):
        await asyncio.sleep(seed % 3 / 2000)
        if row["answer"] == "fails":
            raise ValueError

    async def step(self, text):
        Counted.calls += 1
        try:
            await asyncio.sleep(len(text) % 3 / 2000)
        finally:
            Counted.calls -= 1
        return Step(done=text == "end")

    async def close(self):
        await asyncio.sleep(0.0005)
        Counted.now -= 1


KINDS = ("reset", "reset", "fails", "step", "end", "close", "wait", "wait")
moves = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), max_size=60)


@settings(max_examples=60, deadline=None)
@given(moves, st.integers(1, 4))
def test_no_more_are_open_than_may_be(moves, most):
    Counted.now = Counted.most = 0
    waiting, ready, answers, number = set(), [], Answers(), 0
    with built(Counted, max_open=most) as environments, environments.session(answers) as session:
        for move, choice in moves:
            episode = ready[choice % len(ready)] if ready else None
            if move in ("reset", "fails"):
                session.reset(number, {"prompt": "p", "answer": move}, seed=choice)
                waiting.add(number)
                number += 1
            elif move == "close" and (waiting or ready):
                closed = [*waiting, *ready][choice % (len(waiting) + len(ready))]
                session.close(closed)
                waiting.discard(closed)
                ready = [other for other in ready if other != closed]
            elif move == "wait" and waiting and len(ready) < most:  # else none need come
                # of one that was closed meanwhile
                while (said := answers.take(1)).keys().isdisjoint(waiting):
                    pass
                ((answered, answer),) = said.items()
                waiting.discard(answered)
                ready += (
                    [answered]
                    if isinstance(answer, Opening | Step) and not getattr(answer, "done", False)
                    else []
                )
            elif move in ("step", "end") and episode is not None:
                session.step(episode, action(move))
                ready.remove(episode)
                waiting.add(episode)
    assert Counted.now == 0, "all are closed"
    assert Counted.most <= most


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_calls_are_under_way_than_may_be(concurrency):
    seen = []

    class Watched(Counted):
        async def step(self, text):
            seen.append(Counted.calls)
            return await super().step(text)

    with built(Watched, concurrency=concurrency) as environments:
        answers = Answers()
        with environments.session(answers) as session:
            for episode in range(20):
                session.reset(episode, {"prompt": "p", "answer": ""}, seed=episode)
            assert all(isinstance(answer, Opening) for answer in answers.take(20).values())
            for episode in range(20):
                session.step(episode, action("x"))
            answers.take(20)
    assert max(seen) == concurrency - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_failed_calls": 1.5},
            "environments.max_failed_calls=1.5: expected a share from 0 to 1",
        ),
        ({"turns": 0}, "environments.turns=0: expected at least 1"),
        ({"max_open": 0}, "environments.max_open=0: expected at least 1"),
        ({"timeout": 0}, "environments.timeout=0: expected more than 0"),
        ({"processes": -1}, "environments.processes=-1"),
        (
            {"max_observation": "1B"},
            "environments.max_observation='1B': expected at least 64 bytes",
        ),
        ({"environment": "a:b", "by_name": {"x": "c:d"}}, "expected one of them"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EnvironmentsConfig(**options)


def test_the_name_of_an_environment_is_one_of_the_columns_that_are_read():
    assert EnvironmentsConfig().row_columns == ["prompt", "answer"]
    assert EnvironmentsConfig(by_name={"x": "a:b"}, name_column="kind").row_columns == [
        "prompt",
        "answer",
        "kind",
    ]
