"""Tests of the queue of turns: an engine gets what is ready, waits for no single environment,
and can stop.
"""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from siirl_dask.context import Device
from siirl_dask.environments import Opening, Step
from siirl_dask.errors import Aborted
from siirl_dask.nodes.episodes import episode_queue
from siirl_dask.nodes.episodes.episode_queue import EpisodeQueue
from siirl_dask.rollout import LocalQueue


class OneTurn:
    """An episode of one turn."""

    failure = None
    budget_spent = False

    def __init__(self, number):
        self.number, self.ended = number, False

    def begin(self, opening):
        pass

    def request(self):
        return self.number

    def add_turn(self, result):
        return result

    def add_step(self, step):
        self.ended = True

    def result(self, worker):
        return self.number


class Scripted:
    """A session whose answers the test gives."""

    def __init__(self):
        self.answers, self.asked, self.closed = SimpleQueue(), [], []

    def reset(self, episode, row, seed):
        self.asked.append(episode)

    def step(self, episode, action):
        self.asked.append(episode)

    def close(self, episode):
        self.closed.append(episode)

    def answer(self, *episodes, kind=Opening):
        for episode in episodes:
            self.answers.put((episode, kind(), 0.0))


def queue_of(count, **more):
    session = Scripted()
    queue = EpisodeQueue(
        source=more.pop("source", None) or LocalQueue(range(count)),
        own_count=count,
        make_episode=lambda number: (OneTurn(number), {}, 0),
        session=session,
        answers=session.answers,
        device=Device("w"),
        check_stop=more.pop("check_stop", lambda: None),
        max_failures=0,
        **more,
    )
    return queue, session


def test_eight_times_as_many_episodes_are_open_as_the_engine_has_rows():
    queue, session = queue_of(100)
    assert queue.next(5, wait=False) == []
    assert session.asked == [*range(40)]
    session.answer(*range(3))
    turns = queue.next(5, wait=False)
    assert [request for _, request in turns] == [0, 1, 2]
    for turn, _ in turns:
        queue.complete(turn, turn)
    session.answer(0, 1, kind=Step)
    assert queue.next(5, wait=False) == []
    assert session.closed == [0, 1]
    assert session.asked[-2:] == [40, 41]  # two were closed, and two are opened in their place
    assert queue.usage.most_open == 40


def test_an_engine_with_nothing_to_do_gets_half_of_the_open_turns_or_who_is_there_after_a_while():
    queue, session = queue_of(8)
    queue.next(8, wait=False)
    session.answer(*range(4))
    queue._last_batch -= 1000  # its last batch took so long that it waits for half of them
    assert len(queue.next(8, wait=True)) == 4
    session.answer(4)
    queue._last_batch += 1000  # it took no time at all
    assert len(queue.next(8, wait=True)) == 1


def test_rows_of_the_engine_that_would_stay_empty_take_over_episodes_of_peers():
    asked = []

    def next_(limit, *, wait):
        asked.append(limit)
        return [(number, number) for number in range(min(limit, 8))] if len(asked) == 1 else []

    queue, _ = queue_of(8, source=SimpleNamespace(next=next_, complete=lambda ticket, result: None))
    queue.next(10, wait=False)
    assert asked == [80]
    queue.next(10, wait=False)
    assert asked == [80, 2]  # 8 of its own wait for their environments, and 10 rows are there


def test_a_wait_for_environments_ends_when_the_worker_is_to_stop(monkeypatch):
    monkeypatch.setattr(episode_queue, "_WAIT_SECONDS", 0.001)
    calls = []

    def check_stop():
        calls.append(None)
        if len(calls) > 3:
            raise Aborted("another worker failed")

    queue, _ = queue_of(3, check_stop=check_stop)
    with pytest.raises(Aborted, match="another worker"):
        queue.next(2, wait=True)


def test_the_share_of_filled_rows_counts_turns_under_way(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(episode_queue.time, "monotonic", lambda: now[0])
    queue, session = queue_of(2)
    queue._last_tick = 0.0
    queue.next(2, wait=False)
    session.answer(0, 1)
    turns = queue.next(2, wait=False)
    now[0] = 3.0
    queue.complete(turns[0][0], "x")
    now[0] = 4.0
    queue.complete(turns[1][0], "x")
    assert queue.usage.filled(2) == pytest.approx(7 / 8)
