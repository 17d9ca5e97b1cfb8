"""The message about a hang names who waits for whom; what a worker tells of itself is bounded."""

import sys
import threading
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from siirl_dask.driver.who_waits import WaitGraph, WorkerAnswer, read_answer
from siirl_dask.worker.monitoring.activity import stacks

MEMBERS = {name: f"tcp://10.0.0.{name}:1" for name in "01234"}
AT = "node 'update', train step 3"


def test_who_waits_for_whom_on_which_edge_is_told_beside_the_stacks_of_who_hangs():
    answers = {
        "0": WorkerAnswer(
            True,
            "node 'reward', train step 3",
            stacks=["thread Worker-0", "  mine.py:3 in reward: get(url)"],
        ),
        "1": WorkerAnswer(
            True,
            AT,
            True,
            [("0", "train/reward->update (fetch)", 61.0), ("0", "train/x->y (early)", 2.0)],
        ),
        "2": WorkerAnswer(True, AT, True),
        "3": WorkerAnswer(False, process="stopped", pid=77),
        "4": WorkerAnswer(False),
    }
    assert WaitGraph(MEMBERS, answers, ["0", "3"]).text().splitlines() == [
        "worker '3' at tcp://10.0.0.3:1 answers nothing: its process was stopped (SIGSTOP); kill "
        "-CONT 77 wakes it",
        "worker '4' at tcp://10.0.0.4:1 answers nothing: its process was stopped, holds Python's "
        "lock, or is cut off",
        "worker '0' at tcp://10.0.0.0:1 is in node 'reward', train step 3:",
        "  thread Worker-0",
        "    mine.py:3 in reward: get(url)",
        "worker '1' waits for worker '0' on edge train/reward->update (fetch), for 61 s",
        "worker '2' waits in node 'update', train step 3 for the others of its group",
    ]


TEXT = st.text(max_size=5)
ONE = st.none() | st.booleans() | st.floats() | TEXT
LIST = st.lists(
    st.one_of(ONE, st.lists(ONE, max_size=3), st.tuples(TEXT, TEXT, st.floats()).map(list)),
    max_size=3,
)


@settings(max_examples=50)
@given(
    st.fixed_dictionaries({"place": ONE, "waits": ONE, "owed": LIST, "stacks": LIST}) | LIST | ONE
)
def test_an_answer_of_any_form_becomes_lines_that_a_terminal_takes(told):
    answers = {"0": read_answer(told)}
    assert all(line.isprintable() for line in WaitGraph(MEMBERS, answers, ["0"]).text().split("\n"))


def test_a_text_of_any_length_is_cut():
    answer = read_answer({"place": "x" * 10**6, "waits": True, "owed": [["y" * 10**6] * 2 + [1.0]] * 10**4,
                          "stacks": ["z" * 10**6] * 10**4})  # fmt: skip
    assert len(WaitGraph(MEMBERS, {"0": answer}, ["0"]).text()) < 50_000


def test_stacks_begin_with_the_tasks_own_thread_and_stay_short():
    deep, entered, go_on = sys.getrecursionlimit() // 2, threading.Event(), threading.Event()

    def down(left):
        if left:
            return down(left - 1)
        entered.set()
        while not go_on.is_set():
            time.monotonic()
        return None

    task = threading.Thread(target=down, args=(deep,), name="the task")
    task.start()
    entered.wait()
    lines = stacks(task.ident)
    go_on.set()
    task.join()
    assert lines[0] == "thread the task"
    assert "frames ...]" in lines[1]
    assert any("in down" in line for line in lines)
    assert len(lines) < 60
    assert max(map(len, lines)) <= 160
