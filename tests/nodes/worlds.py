"""A stand-in for environments: each call of a row's environment runs in a thread of a pool, in
any order.
"""

from __future__ import annotations

import importlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from siirl_dask.environments import Failure, Opening, Step
from siirl_dask.environments.protocol import ToolCalls
from siirl_dask.planner import RoleCost, builds


class ThreadWorld:
    """Environments made by ``make()``, whose calls take up to ``delay`` seconds, and fail as
    ``Failure`` where they raise."""

    def __init__(self, make, *, columns=("prompt", "answer"), delay=0.0, max_failures=0, threads=8):
        self.make, self.columns, self.delay, self.max_failures, self.threads = (
            make,
            columns,
            delay,
            max_failures,
            threads,
        )
        self.opened, self.closed, self.most_open = 0, 0, 0

    max_failed_calls = None
    tool_calls = ToolCalls()

    def take_tool_calls(self):
        return self.tool_calls

    def session(self, on_answer):
        return ThreadSession(self, on_answer)

    def lasting_session(self, on_answer):
        return self.session(on_answer).__enter__()

    def close(self):
        pass


class ThreadSession:
    def __init__(self, world, on_answer):
        self.world, self.on_answer = world, on_answer
        self.open, self.lock = {}, threading.Lock()

    def __enter__(self):
        self.pool = ThreadPoolExecutor(self.world.threads)
        return self

    def __exit__(self, *error):
        self.pool.shutdown(cancel_futures=True)
        with self.lock:
            self.world.closed += len(self.open)
            self.open.clear()

    def reset(self, episode, row, seed):
        with self.lock:
            own = self.open[episode] = self.world.make()
            self.world.opened += 1
            self.world.most_open = max(self.world.most_open, len(self.open))
        self.pool.submit(self._call, episode, lambda: own.reset(row, seed), Opening)

    def step(self, episode, action):
        own = self.open[episode]
        self.pool.submit(self._call, episode, lambda: own.step(action), Step)

    def close(self, episode):
        with self.lock:
            del self.open[episode]
            self.world.closed += 1

    def _call(self, episode, call, kind):
        if self.world.delay:
            time.sleep(random.random() * self.world.delay)  # the environment's own work
        try:
            answer = call()
        except Exception as error:
            answer = Failure(f"raised {type(error).__name__}: {error}")
        self.on_answer(episode, kind() if answer is None else answer)


class Echo:
    """Ends after ``row['answer']`` turns, and answers each with how many there were; rewards the
    text's length.
    """

    def reset(self, row, seed):
        self.left, self.turns = int(row["answer"]), 0

    def step(self, action):
        self.turns += 1
        return Step(
            observation=f"<{self.turns}>",
            reward=float(len(action.text)),
            done=self.turns == self.left,
            state=self.turns,
        )


def no_cost(options, workers, config):
    return RoleCost(memory=0)


@builds(preflight=no_cost)
def build_world(device, rank, *, environment: str, delay: float = 0.0, threads: int = 8):
    """A ThreadWorld as a role's object; ``environment`` is ``module:Class``."""
    module, _, name = environment.partition(":")
    return ThreadWorld(getattr(importlib.import_module(module), name), delay=delay, threads=threads)


class AsUsersWrite:
    """An environment whose ``step`` gets a text, and may answer with one."""

    def __init__(self, own):
        self.own = own

    def reset(self, row, seed):
        return self.own.reset(row, seed)

    def step(self, action):
        answer = self.own.step(action.text)
        return Step(observation=answer) if isinstance(answer, str) else answer


@builds(preflight=no_cost)
def build_users_world(device, rank, *, environment: str, delay: float = 0.0, threads: int = 8):
    """As ``build_world``, for a class as users write it."""
    module, _, name = environment.partition(":")
    own = getattr(importlib.import_module(module), name)
    return ThreadWorld(lambda: AsUsersWrite(own()), delay=delay, threads=threads)
