"""Environments and tools for child processes. In a module of tests, each child would import all
that the tests do.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from siirl_dask.environments import Failure, Opening, Step


class Guess:
    """A number to guess: hints go on, the right one ends with a reward."""

    def reset(self, row, seed):
        self.secret, self.seed, self.turns = int(row["answer"]), seed, 0
        return None if row.get("prompt") == "own" else f"guess, {row.get('prompt')}"

    def step(self, text):
        self.turns += 1
        if text == str(self.secret):
            return Step(
                reward=1.0, done=True, state=(self.secret, self.turns), parts={"turns": self.turns}
            )
        return ">" if self.secret > int(text) else "<"


class AsyncGuess(Guess):
    async def reset(self, row, seed):
        await asyncio.sleep(0)
        return super().reset(row, seed)

    async def step(self, text):
        await asyncio.sleep((self.seed % 7) / 1000)
        return super().step(text)


class Tells:
    """Does what the turn says."""

    child = None

    def __init__(self):
        self.closed = False

    def reset(self, row, seed):
        self.row = row
        return perform(self, row["answer"]) if row["answer"] else "began"

    def step(self, text):
        return perform(self, text)

    def close(self):
        if marks := self.row.get("marks"):
            with open(marks, "a") as file:  # noqa: PTH123
                file.write("closed\n")
        if self.row.get("close"):
            perform(self, self.row["close"])


class AsyncTells(Tells):
    async def reset(self, row, seed):
        return super().reset(row, seed)

    async def step(self, text):
        if text == "hang":
            await asyncio.Event().wait()
        if text == "hang on":
            for _ in range(100):
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    continue
        return super().step(text)


def perform(world, text):
    match text:
        case "hang":
            time.sleep(1000)
        case "raise":
            raise ValueError(f"no {world!r}")
        case "exit":
            sys.exit(3)
        case "cancel":
            raise asyncio.CancelledError
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "pid":
            return str(os.getpid())
        case "start":
            child = subprocess.Popen(["sleep", "1000"])
            return str(child.pid)
        case "10 MB":
            return "x" * 10_000_000
        case "10 MB of state":
            return Step(observation="y", state="x" * 40_000_000)
        case "failure":
            return Failure("lost its server")
        case "raise surrogate":
            raise ValueError("a\ud800b")
        case "number":
            return 7
        case "object":
            return Step(reward=object())
        case "nan":
            return Step(reward=float("nan"))
        case "surrogate":
            return "a\ud800b"
        case "messages":
            return [{"role": "user", "content": "hi"}]
        case "no role":
            return [{"content": "hi"}]
        case "rewards":
            return Step(reward={"a": 1.0, "b": -1}, agent="b", done=True)
        case "history":
            return Step(history="all new", state={"b": (1, 2), "a": frozenset({"x"})})
    return f"did {text}"


class Sick:
    """Three turns. With a prompt in four the second one does what the class says."""

    does = ""

    def reset(self, row, seed):
        self.sick, self.turns = sum(map(ord, row["prompt"])) % 4 == 0, 0

    def step(self, text):
        self.turns += 1
        if self.sick and self.turns == 2 and self.does:
            return perform(self, self.does)
        return Step(observation="!", reward=len(text) / 10, done=self.turns == 3)


class Hangs(Sick):
    does = "hang"


class Raises(Sick):
    does = "raise"


class Floods(Sick):
    does = "10 MB"


class Dies(Sick):
    does = "killed"


class AsyncHangs(Sick):
    async def reset(self, row, seed):
        super().reset(row, seed)

    async def step(self, text):
        if self.sick:
            await asyncio.Event().wait()
        return super().step(text)


class Lasts(Sick):
    """Notes its process, and one that it has started, in the folder ``NOTED``; each turn takes a
    moment.
    """

    child = None

    def reset(self, row, seed):
        super().reset(row, seed)
        if Lasts.child is None:
            Lasts.child = subprocess.Popen(["sleep", "1000"])
            Path(os.environ["NOTED"], f"{os.getpid()}-{Lasts.child.pid}").touch()

    def step(self, text):
        time.sleep(0.2)
        return super().step(text)


class NeverEnds(Lasts):
    def step(self, text):
        time.sleep(1000)


class NoWorld:
    def reset(self, prompt, answer):
        return None

    def step(self, text):
        return None


class Shop:
    """Tools with a state, as TRL's ``environment_factory`` has them."""

    def reset(self, stock=0, **kwargs):
        self._stock, self._sold = int(stock), 0
        return f" There are {stock}."

    def sell(self, count: int = 1) -> str:
        """Sell some.

        Args:
            count: How many.
        """
        if count > self._stock:
            raise ValueError(f"only {self._stock} are left in {self!r}")
        self._stock -= count
        self._sold += count
        return f"{self._stock} left"

    async def stock(self) -> dict:
        """Look how many there are."""
        await asyncio.sleep(0)
        return {"left": self._stock, "sold": self._sold}

    def get_reward(self) -> float:
        return self._sold / 10

    def helper(self):
        return "no tool: it has no docstring"


class Marked:
    """A text environment with a tool, which gets the turns without a call."""

    tools = ("look",)

    def reset(self, row, seed):
        self._answer = row["answer"]

    def look(self) -> str:
        """Look."""
        return self._answer

    def step(self, text):
        """Judge."""
        return Step(reward=float(text == self._answer), done=True)

    def render(self) -> str:
        """Draw it; it is no tool, because it is not named."""


class Safe:
    """A tool with state that does what it is told."""

    def reset(self, **row):
        pass

    def touch(self, what: str) -> str:
        """Touch it.

        Args:
            what: How.
        """
        return perform(None, what)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def act(what: str) -> str:
    """Do something.

    Args:
        what: What.
    """
    return perform(None, what)


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "done"


def untyped(a):
    """Nothing.

    Args:
        a: Something.
    """


def made_by_a_function(secret=None):
    return Guess()


class Cart:
    """A class of gymnasium's shape, without it."""

    class _Discrete:
        start, n = 0, 2

    class Box:
        pass

    def __init__(self, space="Discrete"):
        self.action_space = (
            type("Discrete", (self._Discrete,), {})() if space == "Discrete" else self.Box()
        )

    def reset(self, *, seed=None, options=None):
        self._at, self._goal = seed % 3, int(options["answer"])
        return self._at, {}

    def step(self, action):
        self._at += 1 if action else -1
        return (
            self._at,
            float(self._at == self._goal),
            self._at == self._goal,
            abs(self._at) > 9,
            {},
        )

    def close(self):
        pass


class Chat:
    """A class of skyrl-gym's shape, without it."""

    def __init__(self, env_config, extras):
        self._answer = extras["answer"]
        self.turns = 0

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "go"}], {}

    def step(self, action):
        self.turns += 1
        right = action == self._answer
        observations = [] if right else [{"role": "user", "content": "again"}]
        return {
            "observations": observations,
            "reward": float(right),
            "done": right or self.turns > 2,
            "metadata": {},
        }

    def close(self):
        pass


def opens_with_everything(row, seed):
    return Opening(prompt="p")


def frozen_lake():
    import gymnasium

    return gymnasium.make("FrozenLake-v1", is_slippery=False)


def skyrl_environment():
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Last(BaseTextEnv):
        def __init__(self, env_config, extras):
            super().__init__()
            self._answer = extras["answer"]

        def step(self, action):
            right = action.endswith(f"#### {self._answer}")
            return BaseTextEnvStepOutput(
                observations=[], reward=float(right), done=True, metadata={}
            )

    return Last
