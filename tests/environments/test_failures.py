"""Whatever an environment does, the others go on, and the failure is bounded and says what it
was.
"""

import gc
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from siirl_dask.environments import Failure, Step
from siirl_dask.errors import ConfigError
from siirl_dask.testing.environments import Answers, action
from tests.environments import worlds
from tests.environments.conftest import WAYS, Player, built


def children():
    return {child.pid for child in psutil.Process().children()}


def ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def eventually(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return condition()


@pytest.fixture(params=WAYS)
def way(request):
    """The options of a place, and the class for it."""
    return WAYS[request.param] | {
        "environment": worlds.AsyncTells if request.param == "loop" else worlds.Tells
    }


@pytest.fixture
def tells(way, play):
    return play(**way)


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ("raise", "raised ValueError: no <tests.environments.worlds."),
        ("exit", "raised SystemExit: 3"),
        ("cancel", "raised CancelledError"),
        ("failure", "lost its server"),
        ("raise surrogate", "raised ValueError: a?b"),
        ("number", "step gave 7: expected a text, chat messages or None"),
        ("object", "gave the reward <object object at 0x...>: expected a finite number"),
        ("nan", "gave the reward nan: expected a finite number"),
        ("no role", "step gave the message {'content': 'hi'}: expected a role and content"),
    ],
)
def test_a_step_that_gives_nothing_usable_is_a_failure_with_its_reason(tells, turn, reason):
    tells.reset(0)
    tells.reset(1)
    answer = tells.step(turn)
    assert answer.reason.startswith(reason)
    assert "0x7" not in answer.reason
    assert tells.step("x", episode=1) == Step(observation="did x")


def test_a_reset_that_raises_is_a_failure(tells):
    assert tells.reset(0, answer="raise").reason.startswith("raised ValueError")
    assert tells.reset(2, answer="failure") == Failure("lost its server")
    assert tells.reset(1).prompt == "began"


def test_an_observation_is_cut_to_its_bound_with_a_word_that_says_so(way, play):
    tells = play(**way, max_observation="1KiB")
    tells.reset()
    said = tells.step("10 MB").observation
    assert len(said) == 1024
    assert said.endswith("xx [cut: 10000000 bytes]")
    assert tells.step("y").observation == "did y"


def test_what_an_environment_says_is_the_same_everywhere(tells):
    tells.reset(0)
    assert tells.step("surrogate").observation == "a?b"
    assert tells.step("messages").observation == [{"role": "user", "content": "hi"}]
    answer = tells.step("history")
    assert (answer.history, answer.state) == (
        "all new",
        '{"\\"a\\"": ["\\"x\\""], "\\"b\\"": [1, 2]}',
    )
    assert tells.step("rewards") == Step(reward={"a": 1.0, "b": -1.0}, agent="b", done=True)


def test_a_coroutine_that_hangs_takes_only_its_own_episode(play):
    tells = play(worlds.AsyncTells, timeout=1)
    tells.reset(0)
    tells.reset(1)
    assert tells.step("hang") == Failure("took more than 1 s")
    tells.reset(2)
    assert tells.step("hang on", episode=2) == Failure("took more than 1 s"), (
        "it goes on when it is cancelled"
    )
    assert tells.step("x", episode=1) == Step(observation="did x")


def test_a_coroutine_that_goes_on_in_spite_of_its_end_is_said_once(caplog):
    gc.collect()  # what earlier tests have left is said now
    caplog.clear()
    with built(worlds.AsyncTells, timeout=1) as environments:
        tells = Player(environments)
        with tells.session:
            tells.reset(0)
            assert tells.step("hang on") == Failure("took more than 1 s")
    del tells, environments
    gc.collect()
    assert caplog.messages == ["coroutines of environments that go on though cancelled are left: 1"]


def test_a_process_that_hangs_is_killed_with_what_it_started_and_costs_what_it_held(play):
    tells = play(worlds.Tells, processes=2, timeout=1)
    for episode in range(4):  # 0 and 2 in the first, 1 and 3 in the second
        tells.reset(episode)
    pid, started = int(tells.step("pid", 0).observation), int(tells.step("start", 2).observation)
    assert tells.step("pid", 2).observation == str(pid) != tells.step("pid", 1).observation
    assert tells.step("hang", 0) == Failure("took more than 1 s")
    assert ended(pid)
    assert eventually(lambda: ended(started))
    lost = (
        "was lost with the process that held it, in a call of another episode: took more than 1 s"
    )
    assert tells.step("x", 2) == Failure(lost)
    assert tells.step("x", 1) == tells.step("x", 3) == Step(observation="did x")
    tells.reset(5)
    assert tells.step("x", 5) == Step(observation="did x"), "a new process takes new episodes"


@pytest.mark.parametrize(("turn", "code"), [("killed", -9), ("segfault", -11)])
def test_a_process_that_dies_takes_the_episodes_it_held_each_by_name(play, turn, code):
    tells = play(worlds.Tells, processes=1)
    tells.reset(0)
    tells.reset(1)
    assert tells.step(turn, 0) == Failure(f"the process died (exit code {code})")
    assert f"the process died (exit code {code})" in tells.step("x", 1).reason
    tells.reset(2)
    assert tells.step("x", 2) == Step(observation="did x")


def test_a_process_that_is_killed_between_two_calls_is_a_failure_of_the_next(play):
    tells = play(worlds.Tells, processes=1)
    tells.reset(0)
    os.kill(int(tells.step("pid").observation), 9)
    assert "process" in tells.step("x").reason


def test_an_answer_that_is_too_large_is_a_failure_and_not_the_parent_s_memory(play):
    tells = play(worlds.Tells, processes=1)
    tells.reset()
    assert "expected at most" in tells.step("10 MB of state").reason


def test_a_close_that_raises_or_hangs_is_said_and_harms_nothing(play, caplog):
    tells = play(worlds.Tells, columns=["answer", "close"], processes=1, timeout=1)
    for episode, what in enumerate(("raise", "hang")):
        tells.reset(episode, close=what)
        tells.session.close(episode)
    for reason in ("raised ValueError", "took more than 1 s"):
        assert eventually(lambda reason=reason: reason in caplog.text)
    tells.reset(2)
    assert tells.step("x", 2) == Step(observation="did x")


class Broken:
    def __reduce__(self):
        return (int, ("no number",))


def test_what_cannot_be_loaded_in_a_process_is_an_error_before_the_run():
    threads = {*threading.enumerate()}
    with pytest.raises(ConfigError, match="cannot be loaded in a process of its own: ValueError"):
        built(Broken(), processes=1).__enter__()
    with pytest.raises(ConfigError, match="cannot be sent to other processes"):
        built(partial(worlds.Tells, threading.Lock()), processes=1).__enter__()
    assert eventually(lambda: not {*threading.enumerate()} - threads)


@pytest.mark.parametrize("options", [{}, {"processes": 2, "timeout": 30}])
def test_500_open_episodes_leave_no_process_and_no_thread(options, tmp_path):
    threads, processes, marks = {*threading.enumerate()}, children(), tmp_path / "marks"
    with built(worlds.Tells, columns=["answer", "marks"], **options) as environments:
        answers, began = Answers(), time.monotonic()
        with pytest.raises(KeyboardInterrupt), environments.session(answers) as session:
            interrupted(session, answers, str(marks))
        assert time.monotonic() - began < 60
        assert marks.read_text() == "closed\n" * 500
    assert not {*threading.enumerate()} - threads
    assert children() <= processes


def interrupted(session, answers, marks):
    for episode in range(500):
        session.reset(episode, {"answer": "", "marks": marks}, episode)
    answers.take(500)
    for episode in range(0, 500, 2):
        session.step(episode, action("x"))
    raise KeyboardInterrupt


WORKER = """
import time
from tests.environments import worlds
from tests.environments.conftest import Player, built

with built(worlds.Tells, processes=1) as environments:
    player = Player(environments)
    with player.session:
        player.reset(0)
        print(player.step("start").observation, flush=True)
        time.sleep(1000)
"""


def test_what_an_environment_has_started_ends_where_the_worker_is_killed():
    with subprocess.Popen(
        [sys.executable, "-c", WORKER], stdout=subprocess.PIPE, text=True
    ) as worker:
        started = int(worker.stdout.readline())
        assert not ended(started)
        worker.kill()
    assert eventually(lambda: ended(started))


def test_leaving_does_not_wait_for_calls_that_hang(monkeypatch):
    monkeypatch.setattr("siirl_dask.environments.session.PATIENCE", 0.3)
    processes, threads = children(), {*threading.enumerate()}
    with built(worlds.Tells, processes=1) as environments:  # no limit of time
        player = Player(environments)
        with player.session:
            player.reset(0)
            player.session.step(0, action("hang"))
    assert children() <= processes
    assert not {*threading.enumerate()} - threads


def test_functions_in_the_worker_that_could_not_be_stopped_are_refused_with_a_timeout(play):
    made = play(worlds.made_by_a_function, timeout=3)
    assert (
        "Guess.reset is not async: environments.timeout needs environments.processes"
        in made.reset(0).reason
    )
