"""Tasks of a worker run one after the other, in the order of their numbers, whatever thread each
is in.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from siirl_dask.errors import Aborted
from siirl_dask.worker.stop import StopFlag, TaskOrder


def test_tasks_that_come_in_any_order_run_in_order_and_alone():
    order, running, ran = TaskOrder(StopFlag()), threading.Lock(), []

    def task(number):
        with order.take(number):
            assert running.acquire(blocking=False)
            ran.append(number)
            running.release()

    numbers = random.Random(0).sample(range(50), 50)
    with ThreadPoolExecutor(50) as threads:
        list(threads.map(task, numbers))
    assert ran == list(range(50))


def test_no_task_runs_after_one_that_failed():
    order, waiting = TaskOrder(StopFlag()), threading.Event()

    def fail():
        with order.take(0):
            waiting.wait()
            raise ValueError("its own")

    def follow():
        waiting.set()
        with order.take(1):
            pytest.fail("it ran")

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.submit(fail), threads.submit(follow)
        with pytest.raises(ValueError, match="its own"):
            first.result()
        with pytest.raises(Aborted, match="a task before this one failed"):
            second.result()


def test_a_task_that_waits_for_its_turn_notices_that_the_run_is_stopped():
    stop = StopFlag()
    order = TaskOrder(stop)
    threading.Timer(0.05, stop.set, ["the user stopped it"]).start()
    with pytest.raises(Aborted, match="the user stopped it"), order.take(1):
        pytest.fail("it ran")
