"""The scorer: the resource of the role that gives rewards. It calls one reward function for each row."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

from siirl_dask.config import RewardsConfig
from siirl_dask.context import Device, HoldsNoGroups, Rank
from siirl_dask.errors import ConfigError
from siirl_dask.planner import RoleCost, builds
from siirl_dask.rewards.process_pool import Outcome, Pool, Row, call_reward, describe_exception

RewardFn = Callable[..., Any]
"""``(prompt, response, answer, **extra) -> float | dict[str, float]``, sync or async; ``extra`` holds the columns that
the node adds. The key ``reward`` of a dict trains; its other entries are logged and saved beside it.
"""
REWARD_KEY = "reward"
_LARGEST = 3.4028234663852886e38  # the largest float32
_METRIC_NAMES = {"mean", "std", "failures", "greedy", "overlong_penalty"}


@dataclass(frozen=True, slots=True)
class Score:
    """The result of a reward function for one row. It has neither reward nor failure for a row that was not scored."""

    reward: float | None = None
    """The reward; None where the function failed or was not called."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """All numbers of the dict that the function gave, the reward included; empty when it gave a number."""
    failure: str | None = None
    """The reason why there is no reward."""


class Scorer(HoldsNoGroups):
    """Scores rows with one function: in this thread, on an event loop when it is async, or in a pool of processes."""

    def __init__(self, reward: RewardFn, config: RewardsConfig, progress: Callable[[], None] = lambda: None) -> None:
        """``progress`` is called for each row that has its outcome."""
        self._reward = reward
        self._progress = progress
        self._config = config
        self._is_async = inspect.iscoroutinefunction(reward.func if isinstance(reward, partial) else reward)
        if config.timeout is not None and not config.processes and not self._is_async:
            raise ConfigError(
                f"rewards.timeout={config.timeout:g} needs rewards.processes of at least 1: "
                "a function in the worker itself cannot be stopped"
            )
        self._pool = Pool(reward, config.processes) if config.processes else None

    @property
    def name(self) -> str:
        """The function's name, for messages."""
        function = self._reward.func if isinstance(self._reward, partial) else self._reward
        return getattr(function, "__qualname__", repr(function))

    @property
    def max_failures(self) -> int:
        """Rows of a step, over all workers, that may fail."""
        return self._config.max_failures

    def score(self, rows: Sequence[Row]) -> list[Score]:
        """Return one score a row, in order. ``rows`` are the arguments of the function, by name.

        Scoring stops as soon as more than ``max_failures`` rows have failed: the rest is left without a score.
        """
        tally = _Tally(len(rows), self.max_failures, self._progress)
        if self._pool is not None:
            self._pool.call(rows, self._config.timeout, tally.take)
        elif self._is_async:
            with suppress(_TooManyFailures):
                asyncio.run(self._call_concurrently(rows, tally))
        else:
            for index, row in enumerate(rows):
                if not tally.take(index, call_reward(self._reward, row)):
                    break
        return tally.scores

    def close(self) -> None:
        """End the processes of the pool."""
        if self._pool is not None:
            self._pool.close()

    async def _call_concurrently(self, rows: Sequence[Row], tally: _Tally) -> None:
        """Call an async function for all rows. _TooManyFailures ends it, and asyncio cancels the calls under way."""
        semaphore = asyncio.Semaphore(self._config.concurrency)

        async def call(index: int, row: Row) -> None:
            async with semaphore:
                if not tally.exceeded and not tally.take(index, await self._call_async(row)):
                    raise _TooManyFailures

        await asyncio.gather(*(call(index, row) for index, row in enumerate(rows)))

    async def _call_async(self, row: Row) -> Outcome:
        limit = asyncio.timeout(self._config.timeout)
        try:
            async with limit:
                return await self._reward(**row), None
        except Exception as error:  # whatever a user's function raises is reported with its row
            if limit.expired():
                return None, f"took more than {self._config.timeout} s"
            return None, describe_exception(error)


class _TooManyFailures(Exception):
    """Ends the calls of an async function."""


class _Tally:
    """Collects the scores of some rows and counts the failures among them."""

    def __init__(self, rows: int, max_failures: int, progress: Callable[[], None]) -> None:
        self._progress = progress
        self.scores = [Score()] * rows
        self._failures = 0
        self._max_failures = max_failures

    @property
    def exceeded(self) -> bool:
        """True when more rows have failed than may."""
        return self._failures > self._max_failures

    def take(self, index: int, outcome: Outcome) -> bool:
        """Note a row's outcome. Returns True when the next row may be scored."""
        self._progress()
        self.scores[index] = _score_of(outcome)
        self._failures += self.scores[index].failure is not None
        return not self.exceeded


def _score_of(outcome: Outcome) -> Score:
    """Return the score that an outcome makes; a failure where the function gave anything but finite numbers."""
    result, failure = outcome
    if failure is not None:
        return Score(failure=failure)
    parts = result if isinstance(result, Mapping) else {}
    reward = parts.get(REWARD_KEY) if isinstance(result, Mapping) else result
    numbers = {**parts, REWARD_KEY: reward}
    if bad := {str(name): value for name, value in numbers.items() if not _is_number(value)}:
        return Score(failure=f"gave {result!r}: expected a finite number{'' if not parts else f' for {[*bad]}'}")
    if taken := sorted(_METRIC_NAMES & parts.keys()):
        return Score(failure=f"gave parts named {taken}, which are names of metrics already: rename them")
    return Score(float(reward), {str(name): float(value) for name, value in parts.items()})  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    """Return whether a value is a number that is finite as float32, the type of the column."""
    return isinstance(value, Real) and abs(value) <= _LARGEST  # type: ignore[operator]


def check_scorer(options: Mapping[str, Any], workers: Sequence[str], config: object) -> RoleCost:
    """The preflight of ``build_scorer``: a reward function takes no memory that is known."""
    return RoleCost(memory=0)


@builds(preflight=check_scorer, provides=["scorer"])
def build_scorer(device: Device, rank: Rank, *, rewards: RewardsConfig, reward: Callable[..., Any]) -> Scorer:
    """Return the scorer of a role. ConfigError when ``rewards`` asks for what the function cannot do."""
    return Scorer(reward, rewards, device.progress)
